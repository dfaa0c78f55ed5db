"""Several samplers judged on one case at the price of one: what the law does is done once for all that agree.

A law is a function of the case and of what the sampler answers. So it is asked of all of them at once: each
call is handed to every one, and whose answers are bit for bit the first one's is judged with it. Who answers
otherwise, writes to what it was handed, or claims something else where the law looks, is judged again from
the start, by the answers it gave and then by those it goes on to give. What breaks a law is judged alone. So
nobody is let off: each verdict is the one that ``law.run`` gives that sampler by itself.
"""

from dataclasses import dataclass, fields, is_dataclass

import torch

from treeconv._drive import as_claimed, as_handed
from treeconv.tree import VerifyOutput

GIVEN = ("bucket", "own")  # coins that are handed over: then all can be handed the same
PARTS = ("accept_index", "accept_token_num", "predicts", "status")


class FirstOneWroteError(Exception):
    """The first sampler wrote to what it was handed: the others have nothing to be compared with."""


@dataclass
class Answer:
    """What a sampler did when it was called: ``written`` is what it left in the tensors it was handed."""

    output: object = None
    error: BaseException | None = None
    written: list | None = None


class Asked:
    """A sampler that says again what it answered so far, and then goes on."""

    def __init__(self, sampler):
        self.sampler, self.name, self.traits = sampler, sampler.name, sampler.traits
        self.answers, self.turn = [], 0

    def from_the_start(self):
        """Itself, before the first call."""
        self.turn = 0
        return self

    def verify(self, *call, **more):
        """Its answer, from logits."""
        return self.answer("verify", call, more)

    def verify_probs(self, *call, **more):
        """Its answer, from probabilities."""
        return self.answer("verify_probs", call, more)

    def answer(self, method, call, more):
        """The answer that is remembered, or the next one."""
        self.turn += 1
        if self.turn > len(self.answers):
            return getattr(self.sampler, method)(*call, **more)
        remembered = self.answers[self.turn - 1]
        if remembered.written is not None:
            overwrite(tensors_of(call, more), remembered.written)
        if remembered.error is not None:
            raise remembered.error
        return remembered.output


class _Traits:
    """Traits of several: each is the first one's, and who claims another leaves when it is looked at."""

    def __init__(self, together):
        self._together = together

    def __getattr__(self, name):
        return self._together.claim(name)


class Together:
    """Samplers as one backend, which answers what the first of them does.

    ``members`` are those that always answered so; ``left`` are the others.
    """

    name = "together"

    def __init__(self, samplers):
        self.members, self.left = [sampler.from_the_start() for sampler in samplers], []
        self.traits = _Traits(self)

    def claim(self, name):
        """The first one's trait."""
        want = getattr(self.members[0].traits, name)
        self._keep([getattr(member.traits, name) == want for member in self.members])
        return want

    def verify(self, *call, **more):
        """The first one's answer, from logits."""
        return self._ask("verify", call, more)

    def verify_probs(self, *call, **more):
        """The first one's answer, from probabilities."""
        return self._ask("verify_probs", call, more)

    def _ask(self, method, call, more):
        handed = tensors_of(call, more)
        before = [tensor.clone() for tensor in handed]
        first, *others = self.members
        want = self._answer(first, method, call, more, handed, before)
        if want.written is not None:
            raise FirstOneWroteError
        if want.error is not None:
            raise want.error
        stays = [True]
        for other in others:
            got = self._answer(other, method, call, more, handed, before)
            stays.append(got.written is None and is_alike(want.output, got.output))
        self._keep(stays)
        return want.output

    @staticmethod
    def _answer(member, method, call, more, handed, before):
        """One member's answer, which it remembers; what it was handed is as it was before."""
        answer = Answer()
        try:
            answer.output = kept(member.answer(method, call, more))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # said in words where it is judged alone
            answer.error = error
        if not all(map(torch.equal, handed, before)):
            answer.written = [tensor.clone() for tensor in handed]
            overwrite(handed, before)
        if member.turn > len(member.answers):
            member.answers.append(answer)
        return answer

    def _keep(self, stays):
        if not all(stays):
            self.left += [member for member, stay in zip(self.members, stays, strict=True) if not stay]
            self.members = [member for member, stay in zip(self.members, stays, strict=True) if stay]


def tensors_of(call, more):
    """Every tensor of a call, floats as integers of their bits: NaN is compared too."""
    return [
        tensor.view(getattr(torch, f"int{8 * tensor.element_size()}"))
        if tensor.is_floating_point()
        else tensor
        for value in (*call, *more.values())
        for tensor in _tensors_in(value)
    ]


def _tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors_in(getattr(value, part.name))


def overwrite(tensors, values):
    """Write values into tensors."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def kept(output):
    """An output that later calls leave as it is, whatever buffer they return."""
    parts = [getattr(output, part, None) for part in PARTS]
    if not isinstance(output, VerifyOutput) or not all(isinstance(part, torch.Tensor) for part in parts):
        return output
    return VerifyOutput(*(part.clone() for part in parts))


def is_alike(want, got):
    """Whether two outputs are the same, bit for bit."""
    pairs = [(getattr(want, part, None), getattr(got, part, None)) for part in PARTS]
    return all(
        isinstance(w, torch.Tensor)
        and isinstance(g, torch.Tensor)
        and w.dtype is g.dtype
        and torch.equal(w, g)
        for w, g in pairs
    )


def judged(law, case, samplers):
    """Each sampler with its decisions, or with what ``law.run(case, sampler)`` raised.

    Yields:
        ``(sampler, decisions, error)``, ``error`` None where the law is kept.
    """
    for handed, alike in _by_what_is_handed(case, samplers):
        waiting = [Asked(sampler) for sampler in alike]
        while len(waiting) > 1:
            together = Together(waiting)
            try:
                decisions = law.check(handed, together, "cpu")
            except Exception:  # noqa: BLE001  # said in words where each is judged alone
                break
            yield from ((member.sampler, decisions, None) for member in together.members)
            waiting = together.left
        for asked in waiting:
            yield asked.sampler, *alone(law, case, asked.from_the_start())


def _by_what_is_handed(case, samplers):
    """``(handed case, samplers)``: together those that are handed the same, coins included."""
    groups = []
    for sampler in samplers:
        if sampler.traits.coins not in GIVEN:
            yield case, [sampler]
            continue
        try:
            handed = as_handed(as_claimed(case, sampler), sampler)
        except Exception:  # noqa: BLE001  # the same again where it is judged alone
            yield case, [sampler]
            continue
        alike = next((group for one, group in groups if one is handed or one == handed), None)
        if alike is None:
            groups.append((handed, [sampler]))
        else:
            alike.append(sampler)
    yield from groups


def alone(law, case, sampler, device="cpu"):
    """What it decided, and what ``law.run`` raised or None."""
    try:
        return law.run(case, sampler, device), None
    except Exception as error:  # noqa: BLE001  # a crash of the law's own is a finding too
        return 0, error
