"""Make the tiny model that ships with the package: lopti_trl/assets/kk-tiny.

A Qwen2 of under 1 M parameters with a tokenizer of its own, warm-started on texts about generated
2- and 3-person puzzles. As a pretrained model would, it knows two ways to answer: a careful one,
that tries the cases until one fits, and a hasty one, that stops anywhere and guesses. Reinforcement
learning then has something real to bring out. Run:

    python scripts/make_kk_tiny.py
"""

import argparse
import random
from ast import literal_eval
from collections.abc import Iterator

from datasets import Dataset, concatenate_datasets
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from lopti_trl.engines import Sampling, TransformersEngine
from lopti_trl.evaluation import accuracy, evaluate, kk_task
from lopti_trl.tasks import kk
from lopti_trl.tasks.kk_solutions import solution_text

BATCH_SIZE = 32
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def puzzles(num_three_people: int) -> tuple[Dataset, Dataset]:
    """Train-split puzzles: all 2-person ones in many wordings, and as many 3-person ones."""
    two = [kk.generate_puzzles(2, 75, seed) for seed in range(num_three_people // 75)]
    return concatenate_datasets(two), kk.generate_puzzles(3, num_three_people, seed=0)


def texts(
    pools: list[Dataset],
    tokenizer: Qwen2Tokenizer,
    num_batches: int,
    seed: int,
    **style,
) -> Iterator[dict[str, str]]:
    """Batches of texts, from each pool of puzzles in turn."""
    rng = random.Random(seed)
    for i in range(num_batches):
        for row in rng.choices(pools[i % len(pools)], k=BATCH_SIZE):
            statements = literal_eval(row["statements"])
            yield {
                "prompt": kk.build_prompt(row["quiz"], tokenizer),
                "completion": solution_text(row["names"], statements, rng, **style),
            }


def make_tokenizer(rows: Dataset, vocab_size: int) -> Qwen2Tokenizer:
    """Qwen2's own byte-level BPE, trained so that the puzzles' words are one token each.

    Fixed sentences are one token each too: prompts are short, their text is the usual one.
    """
    rng = random.Random(0)
    corpus = [f"system user assistant {row['quiz']}" for row in rows] + [
        solution_text(row["names"], literal_eval(row["statements"]), rng, haste)
        for row in rows
        for haste in ((0.0, 0.0), (1.0, 1.0))
    ]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(corpus, vocab_size)
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")],
    )
    fixed = (kk.SYSTEM_PROMPT, f"{kk.INTRODUCTION} You meet", kk.QUESTION)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*fixed, *tags)])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, args: argparse.Namespace) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=args.width**-0.5,  # the usual 0.02 is for wide models: copying comes late
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def warm_start(model, tokenizer, dataset: Dataset, learning_rate: float, args) -> None:
    config = SFTConfig(
        output_dir=f"{args.output}-checkpoints",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=25,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.01,
        adam_beta2=0.99,
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=1,
        train_sampling_strategy="sequential",  # batches of one puzzle size: little padding
        max_length=512,
        activation_checkpointing=False,
        dataset_num_proc=1,
        seed=args.seed,
    )
    SFTTrainer(model, config, train_dataset=dataset, processing_class=tokenizer).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="lopti_trl/assets/kk-tiny")
    parser.add_argument("--two_people_steps", type=int, default=700)
    parser.add_argument("--careful_steps", type=int, default=1200)
    parser.add_argument("--mixed_steps", type=int, default=250)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--haste", type=float, nargs=2, default=(0.6, 0.15))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocab_size", type=int, default=760)
    parser.add_argument("--num_puzzles", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    set_seed(args.seed)
    two, three = puzzles(args.num_puzzles)
    rows = concatenate_datasets([two, three])
    tokenizer = make_tokenizer(rows, args.vocab_size)
    model = make_model(tokenizer, args)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(rows)} puzzles")
    held_out = concatenate_datasets(
        [
            kk.load_puzzles("generated", "test", [size], count, 1, tokenizer)
            for size, count in ((2, 20), (3, 200))
        ]
    )
    # some haste from the start: answers must come from the puzzle, too
    careful = {"haste": (0.1, 0.02)}
    # one word, so that greedy decoding is hasty as well
    hasty = {"haste": tuple(args.haste), "conclusions": ["So"]}
    for name, pools, steps, style, learning_rate in (
        # 2 people first: checking a claim is learnt several times faster on short texts
        ("2 people", [two], args.two_people_steps, careful, args.learning_rate),
        ("2 and 3 people", [two, three], args.careful_steps, careful, args.learning_rate),
        ("hasty", [two, three], args.mixed_steps, hasty, args.learning_rate / 4),
    ):
        generated = texts(pools, tokenizer, steps, args.seed, **style)
        warm_start(model, tokenizer, Dataset.from_list(list(generated)), learning_rate, args)
        engine = TransformersEngine(model, tokenizer)
        metrics = ["greedy", "sampled"]
        result = evaluate(engine, tokenizer, [kk_task(held_out)], metrics, Sampling(320, 1.0))
        print(f"{name}: {accuracy(result['scores'])}")
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
