#!/bin/bash
# Runs a command on two "hosts": network namespaces of this machine, joined by a cable and cut off
# from everything else. Tries a launch on several nodes (docs/cluster.md) without a cluster:
#
#   scripts/two_hosts.sh accelerate launch --config_file configs/accelerate/ddp.yaml \
#       --num_machines 2 --num_processes 2 --machine_rank MACHINE_RANK \
#       --main_process_ip FIRST_NODE --main_process_port 29500 \
#       scripts/train.py --config kk_tiny_cpu.yaml
#
# MACHINE_RANK becomes 0 and 1, FIRST_NODE the address of the first. Linux with iproute2; no root
# where the kernel lets users make namespaces. If one host fails, the other is stopped.
set -euo pipefail

if [[ -z ${TWO_HOSTS:-} ]]; then # in namespaces of our own, which end with us
    exec env TWO_HOSTS=1 unshare --user --map-root-user --net --mount "$0" "$@"
fi
mount -t tmpfs none /run # where ip keeps its namespaces
for rank in 0 1; do ip netns add "host$rank"; done
ip link add eth0 netns host0 type veth peer name eth0 netns host1
for rank in 0 1; do
    ip -n "host$rank" address add "10.77.0.$((rank + 1))/24" dev eth0
    ip -n "host$rank" link set eth0 up
    ip -n "host$rank" link set lo up
done

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'exit 143' TERM
export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 # this machine's own name leads nowhere
for rank in 0 1; do
    command=("${@//MACHINE_RANK/$rank}")
    ip netns exec "host$rank" "${command[@]//FIRST_NODE/10.77.0.1}" &
done
wait -n
wait -n
