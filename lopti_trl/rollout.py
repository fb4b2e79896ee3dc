"""Around TRL's rollout: the engine is checked and seeded, and a run outlives its failure."""

from contextlib import nullcontext
from pathlib import Path

from transformers import set_seed

from lopti_trl.checkpoint import ResumableGRPOTrainer
from lopti_trl.engines import hash_seed
from lopti_trl.generation import finished_rows_leave
from lopti_trl.update import base_model
from lopti_trl.vllm import SERVE, SharedFailure, require_vllm, server_url


class EngineGRPOTrainer(ResumableGRPOTrainer):
    """`ResumableGRPOTrainer` that generates no more than needed and survives its engine.

    A subclass calls `_seed_engine` before a rollout batch.
    """

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        if args is not None:
            require_vllm(args)
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        if self.use_vllm and self.vllm_mode == "server" and self.accelerator.is_main_process:
            self.vllm_generation.vllm_client = SharedFailure(self.vllm_generation.vllm_client)

    def _seed_engine(self):
        """Give this rollout batch its place in the sequence that `seed` starts.

        A colocated engine draws from the random state of this process, which it set to a constant
        when it was built. The processes of one engine must draw alike.
        """
        if not (self.use_vllm and self.vllm_mode == "colocate" and self.model.training):
            return
        rollout_batch = self._step // self._steps_per_rollout
        engine = self.accelerator.process_index // self.vllm_tensor_parallel_size
        set_seed(hash_seed(self.args.seed, rollout_batch, engine))

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        skips = self.args.skips_finished and not self.use_vllm
        model = base_model(self.model)
        with finished_rows_leave(model, self.generation_config) if skips else nullcontext():
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if len(completion_ids) < len(prompt_ids):
            self._end_without_server()
        return completion_ids, logprobs

    def _end_without_server(self):
        """Save what was learnt, on every process, and say why the run ends.

        Just after an epoch's end the checkpoint is not exact: the new epoch has drawn a number.
        """
        folder = Path(self._get_output_dir(None)) / f"checkpoint-{self.state.global_step}"
        # a checkpoint is of whole optimizer steps; one that is there already is of this one
        is_whole = self._step == self.state.global_step * self.args.gradient_accumulation_steps
        if self.is_in_train and self.state.global_step and is_whole and not folder.is_dir():
            self._save_checkpoint(self.model, None)
        client = getattr(self.vllm_generation, "vllm_client", None)  # the first process has it
        raise ConnectionError(
            f"The vLLM server at {server_url(self.args)} failed, retries included, at optimizer "
            f"step {self.state.global_step}; checkpoints are in {folder.parent}. Start it anew "
            f"({SERVE}) and go on with --resume_from_checkpoint auto."
        ) from (client and client.failure)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        try:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as error:
            functions = ", ".join(self.reward_func_names)
            error.add_note(f"Raised while {functions} scored {len(completions)} completions.")
            raise
