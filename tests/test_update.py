"""Level 4: a leaner layout of the update leaves every gradient as stock TRL computes it."""

import itertools

import pytest
import torch
from conftest import PROMPTS, save_random_model
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding
from trl import GRPOTrainer

from lopti_trl import LoptiGRPOTrainer
from lopti_trl.config import TRICKS
from lopti_trl.update import Layout, concatenate, lay_out, partition_by_length

LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo", "luspo"]


def dapo_first(loss_types: list[str]) -> list:
    """The others are left out of the fast target."""
    return [pytest.param(x, marks=[] if x == "dapo" else pytest.mark.slow) for x in loss_types]


@pytest.fixture(scope="session")
def model_dir(tokenizer, tmp_path_factory) -> str:
    """A model with weights of usual size: large ones magnify the rounding of shifted positions."""
    return save_random_model(tmp_path_factory.mktemp("model"), tokenizer, initializer_range=0.1)


ETA = 0.035  # about half of that model's tokens are rarer


def padded_tokens(run: list[int], prompts: list[int], completions: list[int]) -> int:
    if not run:
        return 0
    return len(run) * (max(prompts[i] for i in run) + max(completions[i] for i in run))


def test_partition_finds_the_fewest_padded_tokens_of_all_cuts():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        num_rows, num_runs = (int(torch.randint(1, n, (1,), generator=generator)) for n in (8, 5))
        prompts = torch.randint(1, 10, (num_rows,), generator=generator)
        completions = torch.randint(1, 60, (num_rows,), generator=generator)
        runs = partition_by_length(prompts, completions, num_runs, max_tokens=10**9)
        assert len(runs) == num_runs
        assert sorted(itertools.chain(*runs)) == list(range(num_rows))
        order = (prompts + completions).argsort(descending=True, stable=True).tolist()
        lengths = prompts.tolist(), completions.tolist()
        best = min(
            sum(
                padded_tokens(order[i:j], *lengths)
                for i, j in itertools.pairwise((0, *cuts, num_rows))
            )
            for cuts in itertools.combinations_with_replacement(range(num_rows + 1), num_runs - 1)
        )
        assert sum(padded_tokens(run, *lengths) for run in runs) == best


def test_partition_keeps_within_the_memory_of_a_stock_micro_batch():
    prompts, completions = torch.full((8,), 2), torch.tensor([100, 9, 8, 7, 6, 5, 4, 3])
    free = partition_by_length(prompts, completions, 2, max_tokens=10**9)
    bounded = partition_by_length(prompts, completions, 3, max_tokens=102)
    assert free == [[0], [1, 2, 3, 4, 5, 6, 7]]
    for run in bounded:
        assert padded_tokens(run, prompts.tolist(), completions.tolist()) <= 102


def test_layout_skips_cuts_and_balances_by_hand():
    prompt_mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 1, 1]])
    completion_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    trainable = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).bool()
    idle = torch.tensor([False, False, False, True])

    def plan(**options):
        defaults = {"balance": False, "skip": False, "cut": False}
        layouts = lay_out(prompt_mask, completion_mask, trainable, idle, 2, **defaults | options)
        return [tuple(layout) for layout in layouts]

    # rows, prompt lengths, completion lengths
    assert plan() == [([0, 1], [2, 3], [4, 2]), ([2, 3], [1, 2], [3, 1])]
    assert plan(skip=True) == [([0], [2], [4]), ([2], [1], [3])]  # 1 has no token, 3 is idle
    assert plan(skip=True, cut=True) == [([0], [2], [2]), ([2], [1], [1])]
    assert plan(balance=True) == plan()  # 14 + 10 tokens
    assert plan(balance=True, skip=True, cut=True) == [([0], [2], [2]), ([2], [1], [1])]
    layout = Layout([0, 1], [2, 3], [4, 2])
    assert (layout.width, layout.num_tokens, layout.num_useful) == ((3, 4), 14, 11)
    everything_idle = lay_out(
        prompt_mask,
        completion_mask,
        trainable,
        ~torch.zeros(4).bool(),
        2,
        balance=True,
        skip=True,
        cut=True,
    )
    assert [layout.rows for layout in everything_idle] == [[], []]


class Gradients(TrainerCallback):
    """Keeps the gradient of every optimizer step."""

    def __init__(self, without: str):
        self.steps = []
        self.without = without

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        grads = [
            p.grad
            for name, p in model.named_parameters()
            if p.grad is not None and name != self.without
        ]
        self.steps.append(torch.cat([g.flatten() for g in grads]).clone())


def gradients(
    make_trainer, trainer_class=LoptiGRPOTrainer, double=False, without="", **fields
) -> list[torch.Tensor]:
    """Gradient of every optimizer step of two rollout batches, at fixed parameters."""
    callback = Gradients(without)
    trainer = make_trainer(
        trainer_class,
        callbacks=[callback],
        **{
            "learning_rate": 0.0,  # the parameters stay: both runs sample the same rollouts
            "max_grad_norm": 1e9,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "max_completion_length": 24,
            "temperature": 1.0,
            "max_steps": 8,
            **fields,
        },
    )
    # two values only: some groups have equal rewards, hence zero advantage
    trainer.reward_funcs = [
        lambda completion_ids, **kwargs: [ids[0] % 3 == 0 for ids in completion_ids]
    ]
    if double:
        for model in filter(None, (trainer.model, trainer.ref_model)):
            model.double()
    trainer.train()
    zero_std = [r["frac_reward_zero_std"] for r in trainer.state.log_history if "reward" in r]
    assert 0 < sum(zero_std) < len(zero_std)
    return callback.steps


def assert_same_gradients(ours: list[torch.Tensor], theirs: list[torch.Tensor], bound=1e-6):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= bound * b.norm()
    assert max(b.norm() for b in theirs) > 1e-3


@pytest.mark.parametrize(
    "fields", [{}, {"beta": 0.04}, {"mask_truncated_completions": True}], ids=str
)
@pytest.mark.parametrize("loss_type", dapo_first(LOSS_TYPES))
def test_every_exact_trick_at_once_keeps_grpos_gradient(make_trainer, loss_type, fields):
    stock = gradients(make_trainer, GRPOTrainer, loss_type=loss_type, **fields)
    inexact = make_trainer(loss_type=loss_type, **fields).args.inexact_tricks()
    tricks = {f"update_{name}": name not in inexact for name in TRICKS}
    # vespo's weight is the exponential of a sum over the sequence, which magnifies rounding
    bound = 5e-6 if loss_type == "vespo" else 1e-6
    ours = gradients(make_trainer, loss_type=loss_type, **tricks, **fields)
    assert_same_gradients(ours, stock, bound)


@pytest.fixture
def in_double(monkeypatch):
    """Qwen2 that takes norms and angles in the precision of its weights, not in float32."""

    def norm(self, x):
        return torch.nn.functional.rms_norm(
            x, self.weight.shape, self.weight, self.variance_epsilon
        )

    def rope(self, x, position_ids):
        angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm)
    monkeypatch.setattr(Qwen2RotaryEmbedding, "forward", rope)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("method", [{}, {"lopti_eta": ETA, "ar_alpha": 0.3}], ids=str)
@pytest.mark.parametrize("loss_type", dapo_first(LOSS_TYPES))
def test_what_differs_is_rounding(make_trainer, in_double, loss_type, method, beta):
    """In double precision nothing does, but for TRL's head, which computes in float32 always."""
    fields = {"loss_type": loss_type, "beta": beta, "double": True, "without": "lm_head.weight"}
    stock = gradients(make_trainer, LoptiGRPOTrainer if method else GRPOTrainer, **fields, **method)
    inexact = make_trainer(loss_type=loss_type, beta=beta).args.inexact_tricks()
    tricks = {f"update_{name}": name not in inexact for name in TRICKS}
    for change, bound in (
        ({"update_project": False}, 1e-13),
        ({"update_project": False, "update_padding_free": True}, 1e-13),
        ({}, 1e-7),  # the head's matrices have other shapes, hence another rounding
    ):
        ours = gradients(make_trainer, **tricks | change, **fields, **method)
        assert ours[0].dtype == torch.double
        assert_same_gradients(ours, stock, bound)


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("loss_type", dapo_first(LOSS_TYPES))
def test_each_trick_alone_keeps_grpos_gradient(make_trainer, trick, loss_type):
    if trick in make_trainer(loss_type=loss_type).args.inexact_tricks():
        pytest.skip("refused with this loss")
    stock = gradients(make_trainer, GRPOTrainer, loss_type=loss_type)
    ours = gradients(make_trainer, loss_type=loss_type, **{f"update_{trick}": True})
    assert_same_gradients(ours, stock, 5e-6 if loss_type == "vespo" else 1e-6)


@pytest.mark.parametrize("loss_type", dapo_first(LOSS_TYPES))
def test_tricks_keep_grpos_gradient_with_tool_output(make_trainer, monkeypatch, loss_type):
    """Every third token is a tool's: attended to, but not in the loss."""
    rollout_of = GRPOTrainer._generate_and_score_completions

    def with_tools(self, inputs):
        rollout = rollout_of(self, inputs)
        mask = rollout["completion_mask"].clone()
        mask[:, 2::3] = 0
        return {**rollout, "tool_mask": mask}

    whole = gradients(make_trainer, GRPOTrainer, loss_type=loss_type)
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", with_tools)
    stock = gradients(make_trainer, GRPOTrainer, loss_type=loss_type)
    inexact = make_trainer(loss_type=loss_type).args.inexact_tricks()
    tricks = {f"update_{name}": name not in inexact for name in TRICKS}
    ours = gradients(make_trainer, loss_type=loss_type, **tricks)
    assert_same_gradients(ours, stock, 5e-6 if loss_type == "vespo" else 1e-6)
    assert (stock[0] - whole[0]).norm() > 1e-2 * whole[0].norm()


@pytest.mark.parametrize(
    "method",
    [
        {"ar_alpha": 0.3},
        {"lopti_eta": ETA},
        {"lopti_quantile": 0.3, "lopti_schedule": "minibatch", "ar_alpha": 0.3},
        {"prob_band": [0.0, 0.05], "lopti_eta": 0.03, "lopti_order": "high_first"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "fields", [{}, {"beta": 0.04}, {"importance_sampling_level": "sequence"}], ids=str
)
@pytest.mark.parametrize("loss_type", dapo_first(["dapo", "grpo", "cispo", "bnpo"]))
def test_tricks_keep_the_gradient_of_every_method(make_trainer, loss_type, method, fields):
    stock = gradients(make_trainer, loss_type=loss_type, **method, **fields)
    ours = gradients(make_trainer, tricks=None, loss_type=loss_type, **method, **fields)
    assert_same_gradients(ours, stock)


@pytest.mark.parametrize(
    "method",
    [
        {"ar_alpha": 0.3},
        {"ar_alpha": 0.3, "tricks": None},
        {"lopti_eta": ETA, "tricks": None},
        {"ar_alpha": 0.3, "lopti_eta": ETA, "lopti_order": "high_first", "tricks": None},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"beta": 0.04}, marks=pytest.mark.slow),
        pytest.param({"importance_sampling_level": "sequence"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("loss_type", dapo_first(LOSS_TYPES))
def test_pi_old_is_read_off_the_update_where_one_step_takes_the_rollouts(
    make_trainer, loss_type, fields, method
):
    aligned = {"steps_per_generation": 2, "loss_type": loss_type} | fields | method
    by_a_pass_of_its_own = gradients(make_trainer, diagnostics=True, **aligned)
    ours = gradients(make_trainer, diagnostics=False, **aligned)
    assert_same_gradients(ours, by_a_pass_of_its_own, 5e-6 if loss_type == "vespo" else 1e-6)
    if "ar_alpha" in method:
        plain = gradients(make_trainer, diagnostics=False, **aligned | {"ar_alpha": 0.0})
        assert not torch.allclose(ours[0], plain[0], rtol=1e-3)


def test_pi_old_of_the_first_phase_is_that_of_a_pass_of_its_own(make_trainer):
    """With moving parameters: the second phase gets what the first one kept."""
    fields = {"gradient_accumulation_steps": 2, "max_completion_length": 24, "max_steps": 4}
    runs = []
    for diagnostics in (True, False):
        trainer = make_trainer(
            tricks=None, diagnostics=diagnostics, lopti_eta=ETA, ar_alpha=0.3, optim="sgd", **fields
        )
        trainer.train()
        runs.append((trainer, concatenate(trainer._buffered_inputs)))
    (before, expected), (ours, rows) = runs
    trained = expected["completion_mask"].bool() & (expected["advantages"] != 0)[:, None]
    assert 0 < expected["low_prob_mask"].sum() < trained.sum()
    for name in ("old_per_token_logps", "low_prob_mask"):
        torch.testing.assert_close(
            rows[name][trained], expected[name][trained], rtol=0, atol=1e-6, check_dtype=False
        )
    for a, b in zip(ours.model.parameters(), before.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for name in (
        "lopti/low_fraction",
        "ar/weight_mean",
        "lopti/low/grad_norm",
        "lopti/low/entropy",
        "lopti/high/ratio_mean",
        "reward",
    ):
        values = [
            [row[name] for row in trainer.state.log_history if name in row]
            for trainer in (ours, before)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-5), name


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"steps_per_generation": 2}, 2),  # forward passes of the two micro-batches
        ({"steps_per_generation": 2, "diagnostics": True}, 2 + 2 + 1 + 1),  # pi_old, a row twice
        ({"steps_per_generation": 2, "lopti_eta": ETA}, 2 * (2 + 1)),  # without a layout
        ({"steps_per_generation": 2, "lopti_eta": ETA, "tricks": None}, 2 * 2),
        ({"steps_per_generation": 4, "lopti_eta": ETA, "tricks": None}, 4 * (2 + 1)),
        ({"steps_per_generation": 4}, 4 + 4),  # the second step needs the rollout's pi_old
        ({"steps_per_generation": 2, "num_iterations": 2}, 2 * 2 + 2),
    ],
    ids=str,
)
def test_no_pass_is_made_for_what_the_update_gives(make_trainer, fields, passes):
    options = {"ar_alpha": 0.3, "diagnostics": False, "gradient_accumulation_steps": 2} | fields
    trainer = make_trainer(max_completion_length=24, **options)
    count = 0

    def on_pass(module, args, kwargs, output):
        nonlocal count
        count += "labels" in kwargs  # not those of generation

    trainer.model.register_forward_hook(on_pass, with_kwargs=True)
    steps = options["steps_per_generation"] // 2 * options.get("num_iterations", 1)
    trainer.args.max_steps = steps * (2 if "lopti_eta" in options else 1)
    trainer.train()
    assert count == passes
    (mean,) = {row["ar/weight_mean"] for row in trainer.state.log_history[:1]}
    assert 0.7 < mean < 1


def test_tricks_keep_the_gradient_under_lora_and_checkpointing(make_trainer):
    fields = {
        "peft_config": LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        ),
        "activation_checkpointing": True,
        "lopti_eta": ETA,
        "ar_alpha": 0.3,
    }
    stock = gradients(make_trainer, **fields)
    assert_same_gradients(gradients(make_trainer, tricks=None, **fields), stock)


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_type": "dapo", "beta": 0.04, "tricks": False},
        {"loss_type": "bnpo"},
        {"loss_type": "dapo", "lopti_eta": ETA, "ar_alpha": 0.3, "attn_implementation": "eager"},
        {"loss_type": "dapo", "lopti_eta": ETA, "importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_rows_in_one_sequence_keep_the_gradient(make_trainer, fields):
    fields = {"tricks": None, "attn_implementation": "sdpa", **fields}
    fields["model_init_kwargs"] = {"attn_implementation": fields.pop("attn_implementation")}
    stock = gradients(make_trainer, **{**fields, "tricks": False})
    assert_same_gradients(gradients(make_trainer, update_padding_free=True, **fields), stock)


def test_rows_in_one_sequence_compute_no_padding(make_trainer):
    trainer = make_trainer(
        tricks=None, update_padding_free=True, lopti_eta=ETA, max_completion_length=24, max_steps=4
    )
    shapes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: (
            shapes.append(kwargs["input_ids"].shape)
            if kwargs.get("fused_lm_head") and torch.is_grad_enabled()
            else None
        ),
        with_kwargs=True,
    )
    trainer.train()
    assert len(shapes) == 4
    assert all(rows == 1 for rows, _ in shapes)
    padding = [row["update/padding_fraction"] for row in trainer.state.log_history[:-1]]
    assert padding == [0] * 4


def test_padding_free_is_refused_where_rows_would_see_each_other(make_trainer):
    flex = {"attn_implementation": "flex_attention"}
    with pytest.raises(ValueError, match="here it is flex_attention"):
        make_trainer(update_padding_free=True, model_init_kwargs=flex)


def test_old_and_reference_log_probs_are_those_of_a_padded_pass(make_trainer):
    buffers = []
    for tricks in (False, None):
        trainer = make_trainer(tricks=tricks, ar_alpha=0.3, beta=0.04, max_completion_length=24)
        with torch.no_grad():  # a reference that differs from the policy
            for p in trainer.ref_model.parameters():
                p *= 1.1
        trainer.model.train()
        trainer._prepare_inputs([{"prompt": p} for p in PROMPTS[1:3] for _ in range(4)])
        buffers.append(concatenate(trainer._buffered_inputs))
    stock, ours = buffers
    valid = stock["completion_mask"].bool()
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        torch.testing.assert_close(ours[name][valid], stock[name][valid], rtol=0, atol=1e-5)
    assert not torch.equal(stock["old_per_token_logps"], stock["ref_per_token_logps"])


def test_tricks_train_to_the_same_weights(make_trainer):
    """Ratios, clipping and KL with moving parameters, not only the gradient at a fixed point."""
    fields = {
        "lopti_eta": ETA,
        "ar_alpha": 0.3,
        "beta": 0.04,
        "max_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_completion_length": 24,
    }
    runs = [make_trainer(tricks=tricks, **fields) for tricks in (False, None)]
    for trainer in runs:
        torch.manual_seed(3)
        trainer.train()
    for a, b in zip(*(trainer.model.parameters() for trainer in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_tool_output_is_neither_projected_nor_kept(make_trainer):
    trainer = make_trainer(tricks=None, lopti_eta=ETA, gradient_accumulation_steps=2)
    rows = {
        "prompt_ids": torch.ones(8, 3, dtype=torch.long),
        "prompt_mask": torch.ones(8, 3, dtype=torch.long),
        "completion_ids": torch.ones(8, 5, dtype=torch.long),
        "completion_mask": torch.ones(8, 5, dtype=torch.long),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 0]] * 8),
        "advantages": torch.ones(8),
        "old_per_token_logps": torch.tensor([[0.01, 0.9, 0.01, 0.01, 0.01]] * 8).log(),
    }
    batches = trainer._lay_out(rows | trainer._memberships(rows))
    assert all(batch["completion_ids"].size(1) == 1 for batch in batches)  # the low phase
    assert sum(batch["completion_mask"].sum() for batch in batches) == 8
    assert trainer._metrics["train"]["update/tokens_projected"] == [0.5]
    assert trainer._metrics["train"]["update/padding_fraction"] == [0]


def test_metrics_say_what_was_saved(make_trainer):
    trainer = make_trainer(
        tricks=None, lopti_eta=ETA, max_steps=4, max_completion_length=24, temperature=1.0
    )
    trainer.reward_funcs = [lambda completions, **kwargs: [0.0] * 4 + [0.0, 1.0, 1.0, 0.0]]
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert sum(row["update/rows_skipped"] for row in rows) / 4 >= 0.5  # one group of two is idle
    assert all(0 <= row["update/padding_fraction"] < 0.6 for row in rows)
    projected = {phase: [] for phase in ("low", "high")}
    for row in rows:
        phase = "low" if "lopti/low/loss" in row else "high"
        projected[phase].append(row["update/tokens_projected"])
    # each token at most once: idle rows not at all
    assert 0.1 < sum(projected["low"] + projected["high"]) / 2 < 0.9


def test_an_update_with_nothing_to_do_is_a_zero_and_logs_no_averages(make_trainer):
    trainer = make_trainer(tricks=None, lopti_eta=ETA, max_steps=4, optim="sgd", logging_steps=1)
    trainer.reward_funcs = [lambda completions, **kwargs: [1.0] * len(completions)]
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    for p, q in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(p, q)
    row = trainer.state.log_history[0]
    assert (row["loss"], row["grad_norm"], row["update/rows_skipped"]) == (0, 0, 1)
    assert "entropy" not in row
    assert "lopti/low/ratio_mean" not in row


def test_entropy_is_that_of_the_tokens_trained(make_trainer):
    """TRL would count tokens that were not projected as zeros."""
    fields = {"lopti_eta": ETA, "learning_rate": 0.0, "max_steps": 2, "max_completion_length": 24}
    runs = {}
    for project in (False, True):
        trainer = make_trainer(**fields, update_project=project)
        trainer.train()
        runs[project] = trainer.state.log_history[0]
    assert runs[True]["entropy"] == pytest.approx(runs[False]["lopti/low/entropy"])
    assert runs[True]["lopti/low/entropy"] == pytest.approx(runs[False]["lopti/low/entropy"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "bnpo", "update_balance": True}, "bnpo divides by the micro-batch's"),
        ({"loss_type": "grpo", "update_cut": True}, "update_cut=True would change the gradient"),
        (
            {"importance_sampling_level": "sequence", "update_project": True},
            "the ratio of a sequence needs all its tokens",
        ),
        ({"entropy_coef": 0.1, "update_skip": True}, "the entropy bonus is a mean"),
        ({"top_entropy_quantile": 0.5, "update_skip": True}, "the entropy quantile is taken"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "update_trim": True},
            "optimizer steps span rollout batches",
        ),
    ],
    ids=str,
)
def test_a_trick_that_would_change_the_gradient_is_refused(make_trainer, fields, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**fields)


def test_tricks_are_on_by_themselves_only_with_a_method_and_where_exact(make_trainer):
    def tricks(**fields):
        return make_trainer(tricks=None, **fields)._tricks

    assert tricks() == frozenset()  # off is TRL, bit for bit
    assert tricks(ar_alpha=0.3, loss_type="dapo") == frozenset(TRICKS)
    assert tricks(ar_alpha=0.3, loss_type="bnpo") == {"trim", "project"}
    assert tricks(ar_alpha=0.3, loss_type="grpo") == {"trim", "balance", "skip", "project"}
    assert tricks(ar_alpha=0.3, entropy_coef=0.1) == {"trim"}
    assert tricks(ar_alpha=0.3, update_trim=False, loss_type="dapo") == frozenset(TRICKS) - {"trim"}
