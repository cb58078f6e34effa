"""Claims of points by workers, in a database that processes, also on several machines, share.

A claim is a trial of an Optuna study: WAITING, RUNNING, then finished.  The outcome of a point is stored only in the
sweep's files.  A point that has no outcome and no waiting or running trial gets a new trial, whatever happened to its
earlier trials.

A worker that runs a point holds a file lock and records heartbeats.  On the same machine, a free lock shows at once
that its holder is dead.  For workers on other machines the heartbeats decide, by the clock of the database.
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
"""A point fails once its worker was killed this many times in a row without a new checkpoint in between."""

_OPEN_ATTEMPTS = 8
_OPEN_STATES = (TrialState.WAITING, TrialState.RUNNING)


class ClaimStore(NamedTuple):
    """A sweep's database and its folder of lock files.

    unowned_since: number of a running trial without a recorded owner -> when it was first seen (monotonic seconds).
    shown_url: the database's URL without its password.
    """

    study: optuna.Study
    storage: RDBStorage
    locks: Path
    unowned_since: dict[int, float]
    shown_url: str


OutcomeLookup = Callable[[int], Outcome | None]
"""Point number -> outcome of the point, None if it has not ended."""


class Claim(NamedTuple):
    """A point that this worker may run.

    point: number of the point.  trial: id of the trial in the database.  lock: the open lock file; closing it unlocks.
    kills: number of the point's latest workers that were killed with the same newest checkpoint as now.
    """

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
    """Open the database at `url`, and create its tables, the study `name` and the folder `locks` if they are missing.

    direction: 'max' or 'min'.  check: called while another process locks an SQLite file; may raise to stop waiting.

    Raises UserError if the database cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    shown_url, full_url = database.parse_database_url(url)
    study_direction = 'maximize' if direction == 'max' else 'minimize'
    for attempt in range(_OPEN_ATTEMPTS):  # if several processes create the tables at once, all but one fail
        try:
            storage = database.open_storage(full_url, check)
            study = optuna.create_study(
                storage=storage, study_name=name, direction=study_direction, pruner=pruner, load_if_exists=True
            )
        except ImportError as error:
            raise database.missing_driver_error(shown_url, full_url) from error
        except (OptunaError, sqlalchemy.exc.SQLAlchemyError, KeyError) as error:
            if attempt == _OPEN_ATTEMPTS - 1:
                message = f'--storage={shown_url} cannot be opened: {database.error_summary(error)}'
                raise UserError(message) from error
            time.sleep(random.uniform(0.1, 0.5))
        else:
            locks.mkdir(parents=True, exist_ok=True)
            return ClaimStore(study, storage, locks, {}, shown_url)
    raise AssertionError


@contextmanager
def convert_database_errors(store: ClaimStore) -> Iterator[None]:
    """Raise `database.DatabaseFailed` in place of any error of the database or of Optuna."""
    try:
        yield
    except (OptunaError, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as error:
        message = f'--storage={store.shown_url} fails: {database.error_summary(error)}'
        raise database.DatabaseFailed(message) from error


def close_claim_store(store: ClaimStore) -> None:
    """Close all connections to the database."""
    store.storage.remove_session()
    store.storage.engine.dispose()


# Claims


def claim_point(
    store: ClaimStore, points: Sequence[int], find_outcome: OutcomeLookup, newest_step: Callable[[int], int]
) -> Claim | None:
    """Claim the next of `points` that no worker runs; return None if there is none at the moment.

    newest_step: point number -> step of its newest checkpoint.
    """
    _fail_dead_trials(store, find_outcome)
    _add_missing_trials(store, points, find_outcome)
    for trial in store.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        lock = _lock(store, str(trial.user_attrs['point']))
        if lock is None:
            continue
        if claim := _start_trial(store, trial, lock, find_outcome, newest_step):
            return claim
        lock.close()
    return None


def _start_trial(
    store: ClaimStore,
    trial: FrozenTrial,
    lock: TextIO,
    find_outcome: OutcomeLookup,
    newest_step: Callable[[int], int],
) -> Claim | None:
    """Set a waiting trial to RUNNING; return None if another worker was faster, or the trial is not needed."""
    point, trial_id = trial.user_attrs['point'], trial._trial_id
    try:
        if not store.storage.set_trial_state_values(trial_id, TrialState.RUNNING):
            return None
    except UpdateFinishedTrialError:
        return None
    step = newest_step(point)
    store.storage.record_heartbeat(trial_id)
    store.storage.set_trial_user_attr(trial_id, 'owner', {'host': _machine_id(), 'step': step})
    others = [other for other in _point_trials(store, point) if other._trial_id != trial_id]
    # Workers on two machines may both have added a trial for this point.  If both trials run, both workers release
    # theirs, and one new trial is added.
    if find_outcome(point) or any(other.state is TrialState.RUNNING for other in others):
        release_claim(store, trial_id, 'not needed')
        return None
    return Claim(point, trial_id, _count_kills(others, step), lock)


def _count_kills(trials: Sequence[FrozenTrial], step: int) -> int:
    """Return how many of the latest trials of a point were killed at the checkpoint of `step`."""
    count = 0
    for trial in reversed([trial for trial in trials if trial.state.is_finished()]):
        if 'end' in trial.user_attrs or trial.user_attrs.get('owner', {}).get('step', step) != step:
            break
        count += 1
    return count


def release_claim(store: ClaimStore, trial: int, how: str) -> None:
    """End a claim without a result.

    how: 'failed', 'stopped' or 'not needed'.  A trial without this attribute counts as one whose worker was killed.
    """
    with suppress(UpdateFinishedTrialError):
        store.storage.set_trial_user_attr(trial, 'end', how)
        store.storage.set_trial_state_values(trial, TrialState.FAIL)


def finish_claim(store: ClaimStore, trial: int, outcome: Outcome) -> None:
    """End a claim whose outcome has been written to the sweep's files."""
    number = store.storage.get_trial(trial).number
    match outcome.status:
        case 'done':
            store.study.tell(number, outcome.value, skip_if_finished=True)
        case 'pruned':
            store.study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
        case _:
            release_claim(store, trial, 'failed')


def report_evaluation(store: ClaimStore, trial: Trial, number: int, value: float) -> bool:
    """Report the score of evaluation `number` to the pruner; return whether the pruner stops the run."""
    # The evaluation may have been reported already, before the worker was killed.
    if number not in store.storage.get_trial(trial._trial_id).intermediate_values:
        trial.report(value, number)
    return trial.should_prune()


def send_heartbeat(store: ClaimStore, trial: int) -> bool:
    """Record a heartbeat; return False if the claim was given to another worker, as after a suspend of the machine."""
    store.storage.record_heartbeat(trial)
    return store.storage.get_trial(trial).state is TrialState.RUNNING


def _point_trials(store: ClaimStore, point: int) -> list[FrozenTrial]:
    return [trial for trial in store.study.get_trials(deepcopy=False) if trial.user_attrs['point'] == point]


# Dead workers


def _fail_dead_trials(store: ClaimStore, find_outcome: OutcomeLookup) -> None:
    """End the running trials whose workers are dead."""
    start = time.monotonic()
    store.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    if time.monotonic() - start > HEARTBEAT_SECONDS:
        # The database was locked, so the heartbeats of live workers are late too; they get time to catch up.
        return
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', ExperimentalWarning)
        optuna.storages.fail_stale_trials(store.study)
    for trial in store.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        owner = trial.user_attrs.get('owner')
        if owner is None:
            # The worker has just claimed the trial, or was killed before its first heartbeat; in the latter case
            # Optuna never ends the trial.
            first_seen = store.unowned_since.setdefault(trial.number, time.monotonic())
            may_be_dead = time.monotonic() - first_seen > GRACE_SECONDS
        else:
            may_be_dead = owner['host'] == _machine_id()
        point = trial.user_attrs['point']
        if may_be_dead and (lock := _lock(store, str(point))):
            with lock, suppress(UpdateFinishedTrialError):
                if outcome := find_outcome(point):  # the worker died after it wrote the outcome
                    finish_claim(store, trial._trial_id, outcome)
                else:
                    store.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def _machine_id() -> str:
    """Return an id of this machine, on which file locks are reliable; host names alone may be equal."""
    with suppress(OSError):
        return f'{socket.gethostname()} {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}'
    return socket.gethostname()


def _add_missing_trials(store: ClaimStore, points: Sequence[int], find_outcome: OutcomeLookup) -> None:
    """Add a trial for each point that has no outcome and no waiting or running trial."""
    lock = _lock(store, 'fill')
    if lock is None:  # another process is adding them
        return
    with lock:
        trials = store.study.get_trials(deepcopy=False)
        open_points = {trial.user_attrs['point'] for trial in trials if trial.state in _OPEN_STATES}
        failed_trials = {trial.user_attrs['point']: trial for trial in trials if trial.state is TrialState.FAIL}
        for point in points:
            if point not in open_points and not find_outcome(point):
                store.study.add_trial(_new_trial(point, failed_trials.get(point)))


def _new_trial(point: int, previous: FrozenTrial | None) -> FrozenTrial:
    """Return a waiting trial with the drawn parameters and reported scores of the point's previous trial."""
    system_attrs: dict[str, Any] = {}
    scores: dict[int, float] = {}
    if previous:
        system_attrs = {'fixed_params': previous.params or previous.system_attrs.get('fixed_params', {})}
        scores = previous.intermediate_values
    return optuna.create_trial(
        state=TrialState.WAITING, user_attrs={'point': point}, system_attrs=system_attrs, intermediate_values=scores
    )


# Locks


def _lock(store: ClaimStore, name: str) -> TextIO | None:
    return lock_point_file(store.locks / name)


def lock_point_file(path: Path) -> TextIO | None:
    """Lock a file, created if missing, as `attnlab.files.lock_file` does; return None if another process holds it.

    Raises RunError if the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return files.lock_file(path)
    except OSError as error:
        raise RunError(f'{path} cannot be locked: {error.strerror}; a sweep needs a file system with locks') from error


# Searches


class _NamingTrial(Trial):
    """A trial whose errors name the parameter."""

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        try:
            return super()._suggest(name, distribution)
        except ValueError as error:  # for example choices that differ from those of an earlier trial
            parameter = f'{name}, drawn from {search_space.describe_distribution(distribution)}'
            raise UserError(f'{parameter}: {" ".join(str(error).split())}') from error


def create_search_trial(store: ClaimStore, claim: Claim, sampler: str, seed: int) -> Trial:
    """Return the trial from which a search draws the claimed point.

    The sampler's seed depends only on `seed` and the point, not on the worker.
    """
    kinds: dict[str, Callable[..., BaseSampler]] = {'random': RandomSampler, 'tpe': TPESampler, 'cmaes': CmaEsSampler}
    store.study.sampler = kinds[sampler](seed=(seed + 1_000_003 * claim.point) % 2**32)
    return _NamingTrial(store.study, claim.trial)


def create_pruner(name: str) -> optuna.pruners.BasePruner:
    """Return the pruner called 'none', 'median', 'asha' or 'hyperband'; its steps are evaluation numbers."""
    return {
        'none': optuna.pruners.NopPruner, 'median': optuna.pruners.MedianPruner,
        'asha': partial(optuna.pruners.SuccessiveHalvingPruner, min_resource=1),
        'hyperband': partial(optuna.pruners.HyperbandPruner, min_resource=1),
    }[name]()  # fmt: skip
