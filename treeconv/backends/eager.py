"""The lazy walk in plain torch, on the CPU or a CUDA device, batched over requests.

One step per tree level: the current row of every request still walking is gathered and softmaxed at
once; rows that no walk visits are never read. The pointers, the coins and the few masses that the
children need are decided on the host, so on a CUDA device every level waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treeconv._validate import check_one_temperature
from treeconv.backends._eager_rules import accept_by_ratio
from treeconv.backends.base import BackendTraits
from treeconv.processors import PROCESSORS
from treeconv.rules import RULES, Rule
from treeconv.tree import Coins, RowStatus, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from treeconv.filters import Filters
    from treeconv.processors import Processors

__all__ = ["EagerBackend"]

_LN2 = math.log(2)
_BLOCK = 256  # elements of a blocked sum: short enough to be accurate, long enough to be fast
_FEW = 2**20  # masses that go to the host at once
_SHORTLIST = 1024  # tokens among which a filter's cut is looked for first
_LARGEST_RECIPROCAL = 2.0**126  # between this and its reciprocal both are normal float32 numbers
_PLAIN = Rule()


class EagerBackend:
    """Torch operations, level by level.

    Extra memory: one float32 row per request, and one as given where several walk; a filtered row is
    sorted besides, and a processed one copied.
    """

    name = "eager"
    traits = BackendTraits(
        takes_filters=True,
        takes_processors=PROCESSORS,
        rules=RULES,
        takes_thresholds=True,
        takes_views=True,
    )

    def verify(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
        processors: Processors | None = None,
    ) -> VerifyOutput:
        """Process each visited row, softmax it at its request's temperature, filter it, then walk."""
        temperatures = temperature.tolist()
        if not temperature.is_cpu:  # nobody has looked at them before
            for one in temperatures:
                check_one_temperature(one)
        return _LazyWalk(batch, logits, temperatures, coins, depth_cap, filters, rule, processors).run()

    def verify_probs(
        self,
        batch: VerifyInput,
        target_probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
    ) -> VerifyOutput:
        """Walk on the probabilities as they are, or filtered."""
        return _LazyWalk(batch, target_probs, None, coins, depth_cap, filters, rule).run()


class _LazyWalk:
    """All requests of one call; each holds its path, and once it stopped its bonus or its status."""

    def __init__(
        self,
        batch: VerifyInput,
        rows: torch.Tensor,
        temperatures: list[float] | None,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None,
        rule: Rule | None,
        processors: Processors | None = None,
    ) -> None:
        self._rule = rule or _PLAIN
        self._rows = rows
        self._processors = processors
        self._seen: list[Counter[int]] = []  # per request, what penalties have seen of its path so far
        if processors is not None and processors.penalties is not None:
            self._seen = [Counter(text) for text in processors.penalties.committed_tokens.tolist()]
        self._filters = filters
        self._order = filters.order if filters else "sequential"
        size, _, self._vocab = rows.shape
        self._is_filtered = (
            [cuts.are_on(self._vocab) for cuts in filters.cuts()] if filters else [False] * size
        )
        self._temperatures = temperatures
        self._depth_cap = depth_cap
        self._tokens = batch.candidates.tolist()
        self._first = batch.retrieve_next_token.tolist()
        self._sibling = batch.retrieve_next_sibling.tolist()
        self._accept_coins = coins.accept.tolist()
        self._final_coins = coins.final.tolist()
        self._scratch: torch.Tensor | None = None
        self._paths = [[0] for _ in range(size)]
        self._bonus = [-1] * size
        self._status = [RowStatus.OK] * size

    def run(self) -> VerifyOutput:
        walking = list(range(len(self._paths)))
        while walking and self._rule.name != "target_only":
            walking = self._step_by_rule(walking)
        while walking:
            temperatures = self._temperatures
            sampled = walking if temperatures is None else [b for b in walking if temperatures[b] > 0]
            greedy = [b for b in walking if b not in set(sampled)] if len(sampled) < len(walking) else []
            walking = self._step_greedy(greedy) if greedy else []
            if sampled:
                walking += self._step_sampled(sampled)
        return self._output()

    def _children(self, request: int) -> list[int]:
        """The children to test at the request's current node: none once the depth cap is reached."""
        path = self._paths[request]
        if len(path) >= self._depth_cap:
            return []
        children = []
        child = self._first[request][path[-1]]
        while child != -1:
            children.append(child)
            child = self._sibling[request][child]
        return children

    def _gather(self, requests: Sequence[int]) -> torch.Tensor:
        """The current rows, ``[A, V]``: in their own dtype, a view for one request; if processed float32."""
        nodes = [self._paths[request][-1] for request in requests]
        rows = self._raw(requests, nodes)
        return rows if self._processors is None else self._processed(rows, requests, nodes)

    def _raw(self, requests: Sequence[int], nodes: list[int]) -> torch.Tensor:
        rows, slots = self._rows, self._rows.shape[1]
        if len(requests) == 1:
            per_request, per_slot, per_token = rows.stride()  # one operation in the place of two
            start = rows.storage_offset() + requests[0] * per_request + nodes[0] * per_slot
            return rows.as_strided((1, self._vocab), (per_slot, per_token), start)
        if rows.stride(0) == slots * rows.stride(1):  # one index_select is far faster than two-way indexing
            flat = [request * slots + node for request, node in zip(requests, nodes, strict=True)]
            return rows.flatten(0, 1).index_select(0, torch.tensor(flat, device=rows.device))
        device = rows.device
        return rows[torch.tensor(requests, device=device), torch.tensor(nodes, device=device)]

    def _processed(self, rows: torch.Tensor, requests: Sequence[int], nodes: list[int]) -> torch.Tensor:
        """Copies of the rows after their requests' penalties, bias and bitmask, in float32."""
        assert self._processors is not None
        device = rows.device
        rows = rows.to(torch.float32, copy=True)
        which = torch.tensor(requests, device=device)
        penalties = self._processors.penalties
        if penalties is not None:
            lanes, tokens, counts = [], [], []
            for lane, (request, node) in enumerate(zip(requests, nodes, strict=True)):
                self._seen[request][self._tokens[request][node]] += 1  # once: a path visits a node once
                seen = {t: n for t, n in self._seen[request].items() if 0 <= t < self._vocab}
                lanes += [lane] * len(seen)
                tokens += list(seen)
                counts += list(seen.values())
            place = torch.tensor(lanes, dtype=torch.int64, device=device), torch.tensor(tokens, device=device)
            of = which[place[0]]
            repetition = penalties.repetition_penalty[of]
            x = rows[place]
            x = torch.where(x > 0, x / repetition, x * repetition)
            x -= penalties.frequency_penalty[of] * torch.tensor(counts, dtype=torch.float32, device=device)
            rows[place] = x - penalties.presence_penalty[of]
        if self._processors.logit_bias is not None:
            rows += self._processors.logit_bias[which]
        if self._processors.token_bitmask is not None:
            words = self._processors.token_bitmask[which, torch.tensor(nodes, device=device)]
            bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
            rows.masked_fill_(bits.flatten(1)[:, : self._vocab] == 0, -math.inf)
        return rows

    def _drop_unusable(
        self, requests: list[int], peaks: list[float], lows: list[float] | None = None
    ) -> list[int]:
        """Record the status of rows that cannot be sampled from; the places of those that can.

        ``amax`` hands NaN on, so one look at the peak finds it anywhere in the row.
        """
        empty_peak = -math.inf if lows is None else 0.0
        if lows is None and all(-math.inf < peak < math.inf for peak in peaks):  # as nearly always
            return list(range(len(requests)))
        usable = []
        for place, (request, peak) in enumerate(zip(requests, peaks, strict=True)):
            if math.isnan(peak) or (lows is not None and lows[place] < 0):
                self._status[request] = RowStatus.NAN
            elif peak == math.inf:
                self._status[request] = RowStatus.POS_INF
            elif peak == empty_peak:
                self._status[request] = RowStatus.EMPTY
            else:
                usable.append(place)
        return usable

    def _step_greedy(self, requests: list[int]) -> list[int]:
        """One level at temperature 0: follow the lowest-index argmax. Returns the requests still walking."""
        # Exact in float32, whatever the rows' dtype; among equals torch returns the first.
        peaks, tops = self._gather(requests).float().max(dim=1)
        chosen = tops.tolist()
        walking = []
        for place in self._drop_unusable(requests, peaks.tolist()):
            request, top = requests[place], chosen[place]
            for child in self._children(request):
                if self._tokens[request][child] == top:
                    self._paths[request].append(child)
                    walking.append(request)
                    break
            else:
                self._bonus[request] = top
        return walking

    def _weights(self, requests: list[int]) -> tuple[list[int], torch.Tensor]:
        """The usable requests and their masses up to a factor, ``[A, blocks * 256]`` float32.

        Logits give ``2 ** ((x - max) / (T ln 2))``, which torch computes several times faster than the
        equal ``exp((x - max) / T)``. Zero behind the vocabulary. Valid until the next call: every level
        uses the same memory, since fresh pages cost as much as the softmax itself.
        """
        given = self._gather(requests)
        if self._scratch is None:
            width = -(-self._vocab // _BLOCK) * _BLOCK
            self._scratch = torch.empty((len(requests), width), device=given.device)
            if width > self._vocab:
                self._scratch[:, self._vocab :] = 0.0
        size, width = self._scratch.shape
        padded = self._scratch if len(requests) == size else self._scratch[: len(requests)]
        values = padded if width == self._vocab else padded[:, : self._vocab]
        # Float32 logits are read where they are: a pass less.
        is_in_place = self._temperatures is not None and given.dtype == torch.float32
        rows = given if is_in_place else values.copy_(given)
        peaks = rows.amax(dim=1, keepdim=True)
        lows = rows.amin(dim=1).tolist() if self._temperatures is None else None
        usable = self._drop_unusable(requests, [peak for (peak,) in peaks.tolist()], lows)
        if len(usable) < len(requests):
            keep = torch.tensor(usable, dtype=torch.int64, device=rows.device)
            rows, padded, peaks = rows[keep], padded[keep], peaks[keep]
            values = padded.narrow(1, 0, self._vocab)
            requests = [requests[place] for place in usable]
        if self._temperatures is not None and requests:
            torch.sub(rows, peaks, out=values)
            scales = [self._temperatures[request] * _LN2 for request in requests]
            if 1 / _LARGEST_RECIPROCAL < min(scales) <= max(scales) < _LARGEST_RECIPROCAL:
                # A product is twice as fast as a quotient, and needs no tensor for a single factor.
                if len(requests) == 1:
                    values.mul_(1 / scales[0])
                else:
                    values.mul_(torch.tensor([[1 / scale] for scale in scales], device=rows.device))
            else:  # the reciprocal may overflow, and 0 * inf is no limit; nor is 0 / 0
                scales = [max(scale, 2.0**-149) for scale in scales]
                values.div_(torch.tensor(scales, device=rows.device)[:, None])
            values.exp2_()
        if self._filters is None:
            return requests, padded
        filtered = [lane for lane, request in enumerate(requests) if self._is_filtered[request]]
        if filtered:
            places = torch.tensor([usable[lane] for lane in filtered], device=rows.device)
            lanes = torch.tensor(filtered, device=rows.device)
            values[lanes] *= self._kept(given[places], values[lanes], [requests[lane] for lane in filtered])
        return requests, padded

    def _kept(self, rows: torch.Tensor, weights: torch.Tensor, requests: list[int]) -> torch.Tensor:
        """Which tokens top-k, top-p and min-p keep, ``[A, V]`` bool; each cut keeps a prefix of the order.

        The first thousand tokens usually hold the cut, and finding them is ten times faster than sorting all.

        Args:
            rows: ``[A, V]`` as given. They order the tokens: exactly, where equal weights may have rounded
                apart (torch takes another exponential at a row's end) or different ones together.

            weights: ``[A, V]`` float32 masses up to a factor.

            requests: whose filters apply.
        """
        assert self._filters is not None
        which = torch.tensor(requests, device=rows.device)
        top_k = self._filters.top_k[which].clamp(max=self._vocab)
        limits = (top_k, self._filters.top_p[which].double(), self._filters.min_p[which].double())
        keys = rows.float() + 0.0  # makes -0.0 a 0.0: a radix sort would tell them apart
        if self._vocab < 4 * _SHORTLIST:
            return self._kept_of(keys, weights, limits, None)[0]
        # topk takes any of the tokens that equal its last one. They, and what is behind, stay undecided.
        values, tokens = keys.topk(_SHORTLIST, dim=1)
        tokens = tokens.sort(dim=1).values
        tokens = tokens.gather(1, keys.gather(1, tokens).sort(dim=1, descending=True, stable=True).indices)
        mask, lengths = self._kept_of(keys, weights, limits, tokens)
        open_lanes = (lengths > (values > values[:, -1:]).sum(dim=1)).nonzero()[:, 0]
        if len(open_lanes):
            rest = tuple(limit[open_lanes] for limit in limits)
            mask[open_lanes] = self._kept_of(keys[open_lanes], weights[open_lanes], rest, None)[0]
        return mask

    def _kept_of(
        self,
        keys: torch.Tensor,
        weights: torch.Tensor,
        limits: tuple[torch.Tensor, ...],
        order: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask and its lengths from the tokens' order, or from its beginning.

        Where the cut is not among ``order``, the length is greater than what can be decided by it.
        """
        top_k, top_p, min_p = (limit[:, None] for limit in limits)
        if order is None:  # stable: among equals the lowest id comes first
            order = keys.sort(dim=1, descending=True, stable=True).indices
        # float64 sums: exact on dyadic masses, and no drift over a large vocabulary.
        falling = weights.gather(1, order).double()
        width = order.shape[1]
        places = torch.arange(width, device=keys.device)[None]
        sums = falling.cumsum(dim=1)
        total = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
        is_unknown = torch.zeros_like(top_k, dtype=torch.bool)
        if self._order == "sequential":
            is_cut = top_k < self._vocab
            total = torch.where(is_cut, sums.gather(1, (top_k - 1).clamp(max=width - 1)), total)
            is_unknown = is_cut & (top_k > width) & (top_p < 1)  # the sum that top-p is a share of
        before = torch.cat([torch.zeros_like(total), sums[:, :-1]], dim=1)
        is_top = (places < top_k) & ((before < top_p * total) | (top_p >= 1))
        # A count, not a mask: weights that rounded apart must not tear a tie.
        count = torch.minimum(is_top.sum(dim=1), (falling >= min_p * falling[:, :1]).sum(dim=1))
        mask = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, order, places < count[:, None])
        return mask, torch.where(is_unknown[:, 0], width, count)

    def _step_sampled(self, requests: list[int]) -> list[int]:
        """One level at temperatures > 0, or on probabilities. Returns the requests still walking."""
        requests, weights = self._weights(requests)
        if not requests:
            return []
        if weights.is_cuda and weights.numel() <= _FEW:  # every small read would wait for the device anew
            weights = weights.cpu()
        children = [self._children(request) for request in requests]
        width = weights.shape[1]
        drafted = [  # places in the flattened weights
            lane * width + self._tokens[requests[lane]][kid]
            for lane, kids in enumerate(children)
            for kid in kids
        ]
        # What is left is each residual, in case that no child is accepted.
        laws = _hosted(weights)
        masses = _take_out(laws, drafted)
        sums = _block_sums(weights)
        totals = np.add.reduce(sums, axis=1).tolist()
        walking, place = [], 0
        for lane, (request, kids) in enumerate(zip(requests, children, strict=True)):
            coin = self._accept_coins[request][self._paths[request][-1]] * self._rule.threshold_acc
            # Probabilities that no filter touched are compared as they are.
            is_law = self._temperatures is None and not self._is_filtered[request]
            own = masses[place : place + len(kids)]
            total = 1.0 if is_law else totals[lane] + sum(own)
            accepted, last_with_mass, acc = -1, -1, 0.0
            single = self._rule.threshold_single if self._rule.threshold_single < 1 else math.inf
            for kid, mass in zip(kids, own, strict=True):
                acc += mass / total
                if mass > 0:
                    last_with_mass = kid
                    if coin < acc or mass / total >= single:
                        accepted = kid
                        break
            place += len(kids)
            if accepted < 0:
                final = self._final_coins[request]
                self._bonus[request] = _draw_bonus(laws[lane], sums[lane], final)
                if self._bonus[request] >= 0:
                    continue
                # The children cover the support (rounding, or a coin of 1): the last one takes the rest.
                accepted = last_with_mass
            self._paths[request].append(accepted)
            walking.append(request)
        return walking

    def _step_by_rule(self, requests: list[int]) -> list[int]:
        """One level by a rule besides target-only. Returns the requests still walking."""
        requests, weights = self._weights(requests)
        walking = []
        for lane, request in enumerate(requests):
            node, p = self._paths[request][-1], weights[lane]
            if self._temperatures is not None and self._temperatures[request] == 0:
                top = p.argmax()  # among equals the first
                p = torch.zeros_like(p)
                p[top] = 1
            elif self._temperatures is not None or self._is_filtered[request]:
                p = p / float(_block_sums(p).sum())
            children = self._children(request)
            tokens = [self._tokens[request][child] for child in children]
            place, coin = -1, self._final_coins[request]
            if self._rule.name == "draw_and_match":
                coin = self._accept_coins[request][node]
            elif children:
                assert self._rule.draft_probs is not None
                slots = [node] if self._rule.name == "chain" else children
                coins = [self._accept_coins[request][slot] for slot in slots]
                place, p = accept_by_ratio(p, self._rule.draft_probs[request, node], tokens, coins)
            if place < 0:
                bonus = _draw_bonus(_hosted(p), _block_sums(p), coin)
                if self._rule.name != "draw_and_match" or bonus not in tokens:
                    self._bonus[request] = bonus
                    continue
                place = tokens.index(bonus)
            self._paths[request].append(children[place])
            walking.append(request)
        return walking

    def _output(self) -> VerifyOutput:
        size, slots = self._rows.shape[:2]
        accept_index: list[list[int]] = []
        predicts, counts = [-1] * (size * slots), [0] * size
        for request, path in enumerate(self._paths):
            places = []
            if self._status[request] is RowStatus.OK:
                counts[request] = len(path) - 1
                places = [request * slots + node for node in path]
                tokens = [self._tokens[request][node] for node in path[1:]]
                for place, token in zip(places, [*tokens, self._bonus[request]], strict=True):
                    predicts[place] = token
            accept_index.append(places + [-1] * (self._depth_cap - len(places)))
        arrays = (np.array(values, np.int32) for values in (accept_index, counts, predicts, self._status))
        output = map(torch.from_numpy, arrays)
        return VerifyOutput(*(output if self._rows.is_cpu else (one.to(self._rows.device) for one in output)))


def _hosted(weights: torch.Tensor) -> torch.Tensor | NDArray[np.float32]:
    """The same memory as a NumPy array, whose single elements are far cheaper, unless it is on a device."""
    return weights.numpy() if weights.is_cpu else weights


def _take_out(laws: torch.Tensor | NDArray[np.float32], places: list[int]) -> list[float]:
    """The masses at these places of the flattened laws, which then hold none there."""
    if not places:
        return []
    if isinstance(laws, np.ndarray):
        masses: list[float] = laws.take(places).tolist()
        laws.put(places, 0.0)
    else:
        flat, index = laws.view(-1), torch.tensor(places, device=laws.device)
        masses = flat[index].tolist()
        flat[index] = 0.0
    return masses


def _block_sums(laws: torch.Tensor) -> NDArray[np.float64]:
    """The sums of each ``_BLOCK`` masses, ``[..., blocks]``, on the host; torch adds them up in float32."""
    sums = torch.sum(laws.view(*laws.shape[:-1], -1, _BLOCK), -1).cpu().numpy()
    return sums.astype(np.float64)  # at once: cheaper than in each operation to come


def _draw_bonus(law: torch.Tensor | NDArray[np.float32], sums: NDArray[np.float64], coin: float) -> int:
    """Smallest t with ``cumsum(law)(t) > coin * sum(law)``; else the last t of positive mass; else -1.

    Two levels: the block, then the place in it; both in float64 on the host.
    """
    ends = np.add.accumulate(sums)
    total = float(ends[-1])
    if not total > 0:
        return -1
    block = _first_above(ends, coin * total, sums)
    masses = law[block * _BLOCK : (block + 1) * _BLOCK]
    if not isinstance(masses, np.ndarray):
        masses = masses.cpu().numpy()
    inside = np.add.accumulate(masses.astype(np.float64))
    if block:
        inside += ends[block - 1]
    return block * _BLOCK + _first_above(inside, coin * total, masses)


def _first_above(sums: NDArray[np.float64], target: float, masses: NDArray[np.floating[Any]]) -> int:
    """First place whose running sum exceeds the target; else the last place of positive mass."""
    place = int(sums.searchsorted(target, side="right"))
    return place if place < len(sums) else int(np.flatnonzero(masses)[-1])
