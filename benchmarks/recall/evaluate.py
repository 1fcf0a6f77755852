"""`python -m benchmarks.recall.evaluate`: the share of unseen questions answered to the letter.

Greedy, through plain `transformers` `generate`; a document is computed once and its KV reused for
all its questions. An answer counts only if it ends by itself. Exits 1 under 95 %.
"""

import argparse
import copy
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvrelay.recall.facts import Document, FactQuestion, document, facts_for, question
from kvrelay.recall.prompt import END, prefix, prompt

MODEL: Final = Path(__file__).resolve().parents[2] / "kvrelay" / "recall" / "model"
PASS: Final = 0.95
UNSEEN: Final = 1 << 40
"""Seeds from here on are never drawn in training, which uses 31 bits."""
PER_DOCUMENT: Final = 20
THIRDS: Final = ("start", "middle", "end")


@dataclass(frozen=True, slots=True)
class PlacedQuestion:
    """A question and where in its document the fact stands: 0 start, 1 middle, 2 end."""

    question: FactQuestion
    third: int


@dataclass(frozen=True, slots=True)
class RecallScore:
    """How many questions were asked and answered right, by third of the document."""

    asked: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        """Right answers as a share of all questions."""
        return sum(self.right) / sum(self.asked)

    def lines(self) -> str:
        """The figures for a reader."""
        thirds = (
            f"{name} {right}/{asked}"
            for name, right, asked in zip(THIRDS, self.right, self.asked, strict=True)
        )
        total = f"{sum(self.right)}/{sum(self.asked)}"
        return f"accuracy {self.accuracy:.2%} ({total}; {', '.join(thirds)})"


def load(folder: Path, dtype: str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model, ready to generate, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not isinstance(model, LlamaForCausalLM):
        raise TypeError(f"{folder}: expected a Llama model, not {type(model).__name__}")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"{folder}: expected a fast tokenizer, not {type(tokenizer).__name__}")
    return model, tokenizer


def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, questions: int, tokens: int
) -> RecallScore:
    """Ask `questions` questions over unseen documents of about `tokens` tokens."""
    asked, right = [0, 0, 0], [0, 0, 0]
    for seed in range(UNSEEN, UNSEEN + -(-questions // PER_DOCUMENT)):
        made = document(seed, facts_for(tokens))
        chosen = list(choose(made, min(PER_DOCUMENT, questions - sum(asked))))
        answers = answer(model, tokenizer, made, [each.question for each in chosen])
        for each, said in zip(chosen, answers, strict=True):
            asked[each.third] += 1
            right[each.third] += said == each.question.answer + END
    return RecallScore(tuple(asked), tuple(right))


def choose(made: Document, count: int) -> Iterator[PlacedQuestion]:
    """`count` questions, evenly from the first fact to the last, in both wordings."""
    last = len(made.facts) - 1
    for i in range(count):
        at = round(i * last / max(1, count - 1))
        yield PlacedQuestion(question(made.facts[at], i), at * len(THIRDS) // len(made.facts))


def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    made: Document,
    asked: list[FactQuestion],
) -> list[str]:
    """What the model says to each question, with the end mark if it ended by itself."""
    shared = remember(model, tokenizer, made)
    prompts: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for at, each in enumerate(asked):
        ids = tokenizer(prompt(made, each))["input_ids"]
        prompts[len(ids)].append((at, ids))
    answers = [""] * len(asked)
    for group in prompts.values():
        texts = generate(model, tokenizer, shared, torch.tensor([ids for _, ids in group]))
        for (at, _), text in zip(group, texts, strict=True):
            answers[at] = text
    return answers


@torch.inference_mode()
def remember(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, made: Document
) -> DynamicCache:
    """The KV of what all prompts over the document share."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokenizer(prefix(made))["input_ids"]]), past_key_values=cache)
    return cache


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, shared: DynamicCache, ids: Tensor
) -> list[str]:
    """Greedy continuations of prompts of equal length, `[prompt, token]`, on top of `shared`."""
    cache = copy.deepcopy(shared)
    cache.batch_repeat_interleave(len(ids))
    call = cast(Callable[..., Tensor], model.generate)  # not typed before 5.24
    output = call(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=16,
        do_sample=False,
    )
    continued = tokenizer.batch_decode(output[:, ids.shape[1] :])
    return [text.replace(str(tokenizer.pad_token), "") for text in continued]


def main() -> None:
    """Measure the recall model on questions that it has not seen."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, options.dtype)
    score = evaluate(model, tokenizer, questions=options.questions, tokens=options.tokens)
    figures = {"accuracy": score.accuracy, "first seed": UNSEEN, **asdict(score)}
    print(json.dumps(figures) if options.json else f"first seed {UNSEEN}\n{score.lines()}")
    sys.exit(score.accuracy < PASS)


if __name__ == "__main__":
    main()
