"""The proof of a policy: each statement is proved, refuted with a counterexample, or said to be undecided."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal

import msgspec
import z3

from causeway_server.router.checks.cases import Case, Expect, decide_case
from causeway_server.router.policy.compiled import Policy

from .claims import KINDS, TAG_CLAIM, Kind, Statement, statements
from .facts import FALSE, Formula
from .outcome import Outcome, World
from .witness import Excluded, Setting, Witness, shrunk

TIMEOUT_S: Final = 10.0
"""The time for one statement, after which it is undecided."""
_ONE: Final = threading.Lock()
_TRIES: Final = 20
_FEW: Final = 8
_SOLVER: Final = z3.Then(
    "simplify",
    "propagate-values",
    "solve-eqs",
    "fpa2bv",
    "simplify",
    "propagate-values",
    "solve-eqs",
    "bit-blast",
    "sat",
)
Status = Literal["proved", "refuted", "undecided"]


class Proof(msgspec.Struct, frozen=True):
    """The result for one statement."""

    kind: Kind
    name: str
    text: str
    status: Status
    case: Case | None = None  # counterexample, as a test case that fails; None for `reach`
    why: str = ""  # why it is undecided
    duration_s: float = 0.0


def prove(
    policy: Policy,
    old: Policy | None = None,
    timeout_s: float = TIMEOUT_S,
    kinds: Collection[str] = KINDS,
    all_s: float = math.inf,
) -> tuple[Proof, ...]:
    """Return the proof of each statement about a policy. One thread proves at a time, as z3 has one context.

    Args:
        old: The policy that it replaces, beyond which nothing more may leave.
        timeout_s, all_s: Maximum seconds for each statement, and for all of them; the rest is undecided.
    """
    with _ONE:
        return tuple(_proofs(policy, old, timeout_s, kinds, time.monotonic() + all_s))


def is_refused(proof: Proof, *, may_leave: bool) -> bool:
    """Return whether a proof stops a rollout. `may_leave`: it is accepted that more may leave the device."""
    accepted = may_leave and (proof.kind == "compare" or proof.name == TAG_CLAIM)
    return proof.status == "refuted" and proof.kind != "reach" and not accepted


def _proofs(
    policy: Policy, old: Policy | None, timeout_s: float, kinds: Collection[str], until: float
) -> Iterator[Proof]:
    world = World([policy] if old is None else [policy, old])
    new = Outcome(world, policy)
    before = None if old is None else Outcome(world, old)
    prover = _Prover(world, policy, old)
    for statement in statements(world, new, policy, before):
        if statement.kind not in kinds:
            continue
        began = time.monotonic()
        proof = prover.proof(statement, min(began + timeout_s, until))
        yield msgspec.structs.replace(proof, duration_s=time.monotonic() - began)


class _Prover:
    def __init__(self, world: World, policy: Policy, old: Policy | None) -> None:
        self._world, self._policy, self._old = world, policy, old

    def proof(self, statement: Statement, until: float) -> Proof:
        """Search a setting that `decide` confirms; a rule that none reaches is refuted, any other statement proved."""
        setting, why = self._search(statement, until)
        if setting is None and not why and self._reads_budget(statement):
            why = "it may depend on what is left of a `budget`, which has no formula"
        is_found, is_about_reach = setting is not None, statement.kind == "reach"
        status: Status = "undecided" if why else "proved" if is_found == is_about_reach else "refuted"
        case = None if setting is None or is_about_reach else self._case(statement, setting)
        return Proof(statement.kind, statement.name, statement.text, status, case, why)

    def _reads_budget(self, statement: Statement) -> bool:
        """Return whether a budget may decide a statement. What stays on the device does not hang on it."""
        if statement.kind == "compare":
            return self._old is not None and self._old.paced
        return statement.kind == "claim" and self._policy.paced

    def _search(self, statement: Statement, until: float) -> tuple[Setting | None, str]:
        """Return a setting that is as the statement says; or why it is not known whether there is one.

        1. Without the definitions of arithmetic and among all texts: without a model there is no such request.
        2. Among texts of the pool: a model is a request, but for expressions without a formula.
        3. With few tags that are not of the pool.
        4. Among all texts: without a model there is no such request.
        """
        facts, why = self._world.facts, ""
        exact = [name == formula for name, formula in facts.definitions.values()]
        if exact and self._solve([statement.sought], until)[0] == z3.unsat:  # (1)
            return None, ""
        excluded = [statement.sought, *exact]
        few = [facts.variables["tags.more"] <= _FEW] if "tags.more" in facts.variables else []
        tried = ""
        for stage in ([z3.Not(one) for one in facts.beyond], *([few] if few else []), []):
            tried = ""
            for _ in range(_TRIES):
                found, model = self._solve([*excluded, *stage], until)
                if found == z3.unknown:
                    return None, "the time is over"
                if model is None:
                    break
                try:
                    setting = Witness(self._world, model).setting()
                except Excluded as unreal:
                    excluded.append(unreal.rule)
                    continue
                except LookupError:
                    why = "it depends on a text of which only some properties are known"
                else:
                    if self._confirms(statement, setting):
                        return setting, ""
                    why = f"it depends on {', '.join(f'`{one}`' for one in self._world.facts.opaque) or 'a text'}"
                excluded.append(self._other_than(model))
            else:  # there may be a request beyond those
                tried = f"the first {_TRIES} answers of the solver are no requests"
        return None, why or tried

    def _solve(self, formulas: Sequence[Formula], until: float) -> tuple[z3.CheckSatResult, z3.ModelRef | None]:
        facts = self._world.facts
        set_up = [z3.Not(one) for name, one in facts.variables.items() if name.startswith("absent:")]
        for solver in (_SOLVER.solver(), z3.SolverFor("QF_FPBV")):  # the first one cannot convert doubles to ints
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            solver.set("timeout", max(1, int(left_s * 1000)))
            solver.add(*facts.rules, *set_up, *formulas)
            if (found := solver.check()) != z3.unknown:
                return found, solver.model() if found == z3.sat else None
        return z3.unknown, None

    def _other_than(self, model: z3.ModelRef) -> Formula:
        """Return a rule that excludes the values of the free facts in this model."""
        facts = self._world.facts
        free = [name for source in facts.opaque for name in (source, f"{source}!")] + list(facts.atoms)
        variables = [facts.variables[name] for name in free if name in facts.variables]
        return z3.Or(FALSE, *[one != model.eval(one, model_completion=True) for one in variables])

    def _confirms(self, statement: Statement, setting: Setting) -> bool:
        """Return whether `decide` agrees that the setting is one that the statement seeks."""
        decided = decide_case(self._policy, *setting)
        if statement.claim is not None:
            old = self._old if statement.kind == "compare" else None
            was_kept = old is None or decide_case(old, *setting).keeps(old, statement.claim)
            return was_kept and not decided.keeps(self._policy, statement.claim)
        return statement.name in (decided.plan.rule, "" if decided.decision is None else decided.decision.rule)

    def _case(self, statement: Statement, setting: Setting) -> Case:
        request, snapshot, session = shrunk(setting, lambda one: self._confirms(statement, one))
        return Case(f"counterexample of {statement.name}", Expect(holds=statement.holds), request, snapshot, session)
