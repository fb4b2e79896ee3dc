"""What a checkpoint needs beyond Trainer's files so that a killed run resumes to the same bits.

TRL saves neither its micro-step counter nor its rollout buffer. Both are kept here, per process,
next to the random state that Trainer saves. A checkpoint is written under another name and renamed
when it is whole, with a manifest of its files.
"""

import json
import logging
import math
import shutil
from pathlib import Path

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    rotate_checkpoints,
    sort_checkpoints,
)
from trl import GRPOTrainer

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STAGING = "checkpoint.partial"  # no checkpoint-N: neither rotation nor resume looks at it


def rollout_file(checkpoint: Path | str, process_index: int) -> Path:
    return Path(checkpoint) / f"rollout_{process_index}.pt"


def save_rollout(checkpoint: Path | str, process_index: int, rollout: dict) -> None:
    """`rollout`: plain containers of tensors, numbers and strings, so that loading runs no code."""
    torch.save(rollout, rollout_file(checkpoint, process_index))


def load_rollout(checkpoint: Path | str, process_index: int, device: torch.device) -> dict | None:
    """What `save_rollout` kept, or None in a checkpoint of plain TRL.

    A process that the saving run did not have gets the first one's, whose world size tells.
    """
    for index in (process_index, 0):
        path = rollout_file(checkpoint, index)
        if path.is_file():
            # torch cannot restore to an indexed CPU, as DDP names it
            location = "cpu" if device.type == "cpu" else device
            return torch.load(path, map_location=location, weights_only=True)
    return None


def write_manifest(checkpoint: Path) -> None:
    """Name and size in bytes of every file of a finished checkpoint."""
    files = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    (checkpoint / MANIFEST).write_text(json.dumps(files, indent=1))


def what_is_broken(checkpoint: Path) -> str | None:
    """The first missing or cut file by the manifest, or None for a whole checkpoint."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())
    except FileNotFoundError:
        # written by plain TRL: Trainer's state is the file it writes last
        whole = (checkpoint / TRAINER_STATE_NAME).is_file()
        return None if whole else f"{TRAINER_STATE_NAME} is missing"
    except ValueError:
        return f"{MANIFEST} is not readable"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def find_last_checkpoint(output_dir: Path | str) -> str | None:
    """The newest whole checkpoint of a run; broken ones are skipped with a warning."""
    for name in reversed(sort_checkpoints(str(output_dir), PREFIX_CHECKPOINT_DIR)):
        defect = what_is_broken(Path(name))
        if defect is None:
            return name
        logger.warning("Skipping the broken checkpoint %s: %s.", name, defect)
    return None


def free_space(folder: Path | str) -> str:
    return f"{shutil.disk_usage(folder).free / 1e9:.2f} GB"


class ResumableGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` that resumes to the same bits, from any step and after any kill."""

    _is_saving = False
    _sampler = None  # a streamed data set has none

    @property
    def _steps_per_rollout(self) -> int:
        """Micro-steps from one rollout batch to the next."""
        return self.args.steps_per_generation * self.num_iterations

    def _rollout_settings(self) -> dict:
        """What a buffered rollout batch and its schedule depend on."""
        names = (
            "per_device_train_batch_size",
            "steps_per_generation",
            "gradient_accumulation_steps",
            "num_generations",
            "num_iterations",
            "ar_alpha",
            "lopti_eta",
            "lopti_quantile",
            "lopti_order",
            "lopti_schedule",
            "prob_band",
            "world_size",
        )
        return {name: getattr(self.args, name) for name in names}

    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / STAGING) if self._is_saving else folder

    def _save_checkpoint(self, model, trial):
        # Written in a staging folder and renamed when whole: a kill leaves earlier ones usable.
        folder, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        staging = folder / STAGING
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)  # of a save that was cut short
        self.accelerator.wait_for_everyone()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._publish(staging / name, folder / name)
        except Exception as error:
            error.add_note(
                f"Raised while {name} was written; {folder} has {free_space(folder)} free. The "
                "checkpoints in it are whole: make room and resume from the last one."
            )
            raise
        finally:
            self._is_saving = False
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)

    def _publish(self, staging: Path, folder: Path):
        """Give a finished checkpoint its name: the one step that makes it count."""
        if self.state.best_model_checkpoint == str(staging):
            self.state.best_model_checkpoint = str(folder)
            self.state.save_to_json(str(staging / TRAINER_STATE_NAME))
        write_manifest(staging)
        shutil.rmtree(folder, ignore_errors=True)  # a broken one that resume skipped
        staging.rename(folder)
        rotate_checkpoints(
            str(folder.parent),
            self.args.save_total_limit,
            self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        rollout = {
            "buffer": self._buffered_inputs if self._step % self._steps_per_rollout else None,
            "metrics": dict(self._metrics["train"]),  # of steps that no log has shown yet
            "settings": self._rollout_settings(),
        }
        save_rollout(output_dir, self.args.process_index, rollout)

    def _load_optimizer_and_scheduler(self, folder):
        super()._load_optimizer_and_scheduler(folder)
        if folder is not None:
            self._resume_rollout(folder)

    def _resume_rollout(self, folder):
        """Go on inside the rollout batch that the checkpoint was saved in."""
        if self._sampler is not None and self._sampler.shuffle:
            for _ in range(math.floor(self.state.epoch)):  # the sampler draws one order an epoch
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        rollout = load_rollout(folder, self.args.process_index, self.args.device)
        if rollout is None:
            if self._step % self._steps_per_rollout:
                logger.warning(
                    "%s was saved by plain TRL inside a rollout batch, without it. The batch is "
                    "generated anew, so the run goes on, but not to the same weights.",
                    folder,
                )
            return
        changed = [
            f"{name}: {old} -> {new}"
            for name, new in self._rollout_settings().items()
            # an earlier version of ours saved fewer
            if (old := rollout["settings"].get(name, new)) != new
        ]
        if changed and rollout["buffer"] is not None:
            raise ValueError(
                f"{folder} was saved inside a rollout batch, which cannot go on with changed "
                f"settings ({', '.join(changed)}). Restore them, or resume from a checkpoint "
                "saved between two rollout batches."
            )
        if changed:
            logger.warning("Resuming with changed settings: %s.", ", ".join(changed))
            self._step -= self._step % self._steps_per_rollout
        self._buffered_inputs = rollout["buffer"]
        self._metrics["train"].update(rollout["metrics"])

    def _get_train_sampler(self, dataset=None):
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler
