"""Who runs which point: claims in a database that processes, also of several machines, share.

A claim is a trial of an optuna study: WAITING, RUNNING, then finished.  How a point ended is in its files alone, so a
point without an outcome that nobody waits for or runs is given a new trial, whatever became of those before.

Who runs a point holds a lock of its file system and sends heartbeats.  On one machine a lock that is free tells at
once that its holder is dead; of another machine the heartbeats tell, by the clock of the database.
"""

import random
import socket
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from attnlab import files
from attnlab.errors import RunError, UserError
from attnlab.sweeps import database, search_space
from attnlab.sweeps.sweep_files import GRACE_SECONDS, HEARTBEAT_SECONDS, Outcome

MAX_KILLS = 4
"""A point whose worker was killed so often, and got no further in between, has failed."""

_ATTEMPTS = 8
_OPEN = (TrialState.WAITING, TrialState.RUNNING)


class ClaimStore(NamedTuple):
    """A sweep's database and locks.

    shown: the database's URL without a password.
    lost: number of a trial that runs without a sign of who runs it -> when that was first seen.
    """

    study: optuna.Study
    storage: RDBStorage
    locks: Path
    lost: dict[int, float]
    shown: str


OutcomeLookup = Callable[[int], Outcome | None]
"""How a point ended, by its number."""


class Claim(NamedTuple):
    """A point that is ours to run.  kills: of its workers before, one after the other, with as many steps done."""

    point: int
    trial: int
    kills: int
    lock: TextIO


def open_claim_store(
    url: str,
    name: str,
    direction: str,
    locks: Path,
    pruner: optuna.pruners.BasePruner | None = None,
    check: Callable[[], None] = lambda: None,
) -> ClaimStore:
    """Opens a database, making in it what is not there; UserError where it cannot be.

    check: called while an SQLite file is locked by another process; raises to stop waiting.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    shown, full = database.parse_database_url(url)
    for attempt in range(_ATTEMPTS):  # where several make the tables at once, all but one fail
        try:
            storage = database.open_storage(full, check)
            direction = 'maximize' if direction == 'max' else 'minimize'
            study = optuna.create_study(
                storage=storage, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
            )
        except ImportError as error:
            raise database.missing_driver_error(shown, full) from error
        except (OptunaError, sqlalchemy.exc.SQLAlchemyError, KeyError) as error:
            if attempt == _ATTEMPTS - 1:
                raise UserError(f'--storage={shown} cannot be opened: {database.error_summary(error)}') from error
            time.sleep(random.uniform(0.1, 0.5))
        else:
            locks.mkdir(parents=True, exist_ok=True)
            return ClaimStore(study, storage, locks, {}, shown)
    raise AssertionError


@contextmanager
def convert_database_errors(store: ClaimStore) -> Iterator[None]:
    """Raises database.Lost for whatever the database raises."""
    try:
        yield
    except (OptunaError, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as error:
        raise database.DatabaseFailed(f'--storage={store.shown} fails: {database.error_summary(error)}') from error


def close_claim_store(store: ClaimStore) -> None:
    """Leaves the database."""
    store.storage.remove_session()
    store.storage.engine.dispose()


# Claims


def claim_point(
    store: ClaimStore, points: Sequence[int], outcome: OutcomeLookup, reached: Callable[[int], int]
) -> Claim | None:
    """Claims the next of the points that nobody runs; None where there is none at the moment.

    outcome: of a point.  reached: up to which step it can be resumed.
    """
    _bury(store, outcome)
    _fill(store, points, outcome)
    for trial in store.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        held = _locked(store, str(trial.user_attrs['point']))
        if held is None:
            continue
        if claim := _claimed(store, trial, held, outcome, reached):
            return claim
        held.close()
    return None


def _claimed(
    store: ClaimStore, trial: FrozenTrial, held: TextIO, outcome: OutcomeLookup, reached: Callable[[int], int]
) -> Claim | None:
    point, own = trial.user_attrs['point'], trial._trial_id
    try:
        if not store.storage.set_trial_state_values(own, TrialState.RUNNING):
            return None
    except UpdateFinishedTrialError:
        return None
    step = reached(point)
    store.storage.record_heartbeat(own)
    store.storage.set_trial_user_attr(own, 'owner', {'host': _here(), 'step': step})
    others = [each for each in _trials(store, point) if each._trial_id != own]
    # On several machines two may fill at once; of two that run, both give way, and one trial is made anew.
    if outcome(point) or any(each.state is TrialState.RUNNING for each in others):
        release_claim(store, own, 'of no use')
        return None
    return Claim(point, own, _kills(others, step), held)


def _kills(trials: Sequence[FrozenTrial], step: int) -> int:
    """How often in a row who ran a point was killed, with no step done from one to the next."""
    count = 0
    for trial in reversed([each for each in trials if each.state.is_finished()]):
        if 'end' in trial.user_attrs or trial.user_attrs.get('owner', {}).get('step', step) != step:
            break
        count += 1
    return count


def release_claim(store: ClaimStore, trial: int, how: str) -> None:
    """Ends a claim without a value.  how: in a word; one without any was killed."""
    with suppress(UpdateFinishedTrialError):
        store.storage.set_trial_user_attr(trial, 'end', how)
        store.storage.set_trial_state_values(trial, TrialState.FAIL)


def finish_claim(store: ClaimStore, trial: int, end_of_it: Outcome) -> None:
    """Ends a claim whose outcome is written."""
    number = store.storage.get_trial(trial).number
    match end_of_it.status:
        case 'done':
            store.study.tell(number, end_of_it.value, skip_if_finished=True)
        case 'pruned':
            store.study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
        case _:
            release_claim(store, trial, 'failed')


def report_evaluation(store: ClaimStore, trial: Trial, number: int, value: float) -> bool:
    """Tells of an evaluation, by its number; whether the pruner ends the run."""
    if number not in store.storage.get_trial(trial._trial_id).intermediate_values:  # else told before a kill
        trial.report(value, number)
    return trial.should_prune()


def send_heartbeat(store: ClaimStore, trial: int) -> bool:
    """A sign of life; False where the claim was taken from us, as after a sleep of the machine."""
    store.storage.record_heartbeat(trial)
    return store.storage.get_trial(trial).state is TrialState.RUNNING


def _trials(store: ClaimStore, point: int) -> list[FrozenTrial]:
    return [each for each in store.study.get_trials(deepcopy=False) if each.user_attrs['point'] == point]


# The dead


def _bury(store: ClaimStore, outcome: OutcomeLookup) -> None:
    """Ends the claims of those who died."""
    begun = time.monotonic()
    store.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    if time.monotonic() - begun > HEARTBEAT_SECONDS:
        # The file was locked, also for the heartbeats of those who live: they come first.
        return
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', ExperimentalWarning)
        optuna.storages.fail_stale_trials(store.study)
    for trial in store.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        owner = trial.user_attrs.get('owner')
        if owner is None:  # taken this moment, or killed at it: before its first heartbeat, so nothing would end it
            first = store.lost.setdefault(trial.number, time.monotonic())
            dead = time.monotonic() - first > GRACE_SECONDS
        else:
            dead = owner['host'] == _here()
        point = trial.user_attrs['point']
        if dead and (held := _locked(store, str(point))):
            with held, suppress(UpdateFinishedTrialError):
                if ended := outcome(point):  # it died between writing that and telling it
                    finish_claim(store, trial._trial_id, ended)
                else:
                    store.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def _here() -> str:
    """This machine: where a lock that is held is seen to be held.  Names alone may be alike."""
    with suppress(OSError):
        return f'{socket.gethostname()} {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}'
    return socket.gethostname()


def _fill(store: ClaimStore, points: Sequence[int], outcome: OutcomeLookup) -> None:
    """A trial for each point that has neither an outcome nor one that waits or runs."""
    if (held := _locked(store, 'fill')) is None:  # another does it
        return
    with held:
        trials = store.study.get_trials(deepcopy=False)
        open_ones = {each.user_attrs['point'] for each in trials if each.state in _OPEN}
        before = {each.user_attrs['point']: each for each in trials if each.state is TrialState.FAIL}
        for point in points:
            if point not in open_ones and not outcome(point):
                store.study.add_trial(_again(point, before.get(point)))


def _again(point: int, before: FrozenTrial | None) -> FrozenTrial:
    """A trial that goes on with what one before it of the same point had drawn and told."""
    drawn = {'fixed_params': before.params or before.system_attrs.get('fixed_params', {})} if before else {}
    told = before.intermediate_values if before else {}
    return optuna.create_trial(
        state=TrialState.WAITING, user_attrs={'point': point}, system_attrs=drawn, intermediate_values=told
    )


# Locks


def _locked(store: ClaimStore, name: str) -> TextIO | None:
    return lock_point_file(store.locks / name)


def lock_point_file(path: Path) -> TextIO | None:
    """As `attnlab.files.lock_file`; RunError where there are none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return files.lock_file(path)
    except OSError as error:
        raise RunError(f'{path} cannot be locked: {error.strerror}; a sweep needs a file system with locks') from error


# Searches


class _Named(Trial):
    """A trial whose errors name the parameter."""

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        try:
            return super()._suggest(name, distribution)
        except ValueError as error:  # as for choices that are not those of an earlier trial
            what = f'{name}, drawn from {search_space.describe_distribution(distribution)}'
            raise UserError(f'{what}: {" ".join(str(error).split())}') from error


def create_search_trial(store: ClaimStore, claim: Claim, sampler: str, seed: int) -> Trial:
    """What a search draws from.  Its draws are of the seed and the point alone, whichever worker runs it."""
    kinds: dict[str, Callable[..., BaseSampler]] = {'random': RandomSampler, 'tpe': TPESampler, 'cmaes': CmaEsSampler}
    store.study.sampler = kinds[sampler](seed=(seed + 1_000_003 * claim.point) % 2**32)
    return _Named(store.study, claim.trial)


def create_pruner(name: str) -> optuna.pruners.BasePruner:
    """By its name; a step of it is an evaluation."""
    return {
        'none': optuna.pruners.NopPruner, 'median': optuna.pruners.MedianPruner,
        'asha': partial(optuna.pruners.SuccessiveHalvingPruner, min_resource=1),
        'hyperband': partial(optuna.pruners.HyperbandPruner, min_resource=1),
    }[name]()  # fmt: skip
