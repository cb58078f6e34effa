"""A worker process: runs points of a sweep one after another, so that they share imports and compiled programs."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from optuna.trial import Trial

from attnlab import configs
from attnlab.errors import Diverged, Pruned, RunError, Stopped, UserError
from attnlab.report.values import crop_text, format_value
from attnlab.sweeps import database, points, search_space, storage, sweep_files
from attnlab.sweeps.points import Point, SweepPlan
from attnlab.sweeps.progress import SweepProgress
from attnlab.sweeps.signals import StopSignals, handle_stop_signals
from attnlab.sweeps.sweep_files import HEARTBEAT_SECONDS, Outcome
from attnlab.train import metrics, run
from attnlab.train.loop import EvaluationCallback

MAX_REASON_LENGTH = 400
"""Most characters of the reason of a failure; the message of an out-of-memory error can be pages long."""

POLL_SECONDS = 1.0
"""Seconds between two attempts to claim a point, and between two checks whether a heartbeat is due."""


def run_points(progress: SweepProgress, study_name: str, url: str) -> None:
    """Claim and run points until every point of the sweep has ended, here or in another worker.

    Raises Stopped after a signal, once the running point has saved its state, and RunError if the database fails.
    """
    plan = progress.plan
    pruner = storage.create_pruner(plan.search['pruner'] if plan.search else 'none')
    with handle_stop_signals() as signals, ExitStack() as stack:
        locks = progress.folder / 'locks'
        store = storage.open_claim_store(url, study_name, plan.direction, locks, pruner, signals.check)
        stack.callback(storage.close_claim_store, store)
        stack.enter_context(storage.convert_database_errors(store))
        while not all(progress.find_outcome(number) for number in progress.point_numbers):
            signals.check()
            claim = storage.claim_point(store, progress.point_numbers, progress.find_outcome, progress.newest_step)
            if claim is None:
                time.sleep(POLL_SECONDS)
                continue
            with claim.lock:
                _run_claimed(progress, store, claim, signals)
        signals.check()


def run_point(progress: SweepProgress, number: int) -> Outcome:
    """Run one point without a database and return its outcome; if it has ended before, return that outcome.

    Raises Stopped after a signal, also if the signal came too late to stop the point, and RunError if another process
    runs the point.
    """
    if (lock := storage.lock_point_file(progress.folder / 'locks' / str(number))) is None:
        raise RunError(f'point {number} is run by another process')
    with lock, handle_stop_signals() as signals:
        outcome = progress.find_outcome(number) or _run(progress, progress.plan.points[number], signals)
        signals.check()
        return outcome


# A point


def _ignore_evaluation(step: int, scores: dict[str, float]) -> None:
    """Ignore an evaluation: the callback of points that are not pruned."""


def _run_claimed(
    progress: SweepProgress, store: storage.ClaimStore, claim: storage.Claim, signals: StopSignals
) -> None:
    """Run a claimed point, write its outcome, and end the claim."""
    plan, folder = progress.plan, progress.folder
    on_evaluation: EvaluationCallback = _ignore_evaluation
    outcome = None
    if plan.search:
        seed: Any = plan.base.seed
        trial = storage.create_search_trial(store, claim, plan.search['sampler'], seed)
        point, outcome = _draw_point(progress, store, claim.point, trial)
        on_evaluation = partial(_report_evaluation, progress, store, trial, point)
    else:
        point = plan.points[claim.point]
    if outcome is None and claim.kills >= storage.MAX_KILLS:
        reason = f'its worker was killed {claim.kills} times with no step saved in between'
        seconds = sweep_files.read_training_seconds(folder, point.name)
        outcome = _failed_outcome(plan, RunError(reason), seconds)
    try:
        if outcome is None:
            send_heartbeat = partial(storage.send_heartbeat, store, claim.trial)
            outcome = _run(progress, point, signals, on_evaluation, send_heartbeat)
        else:
            sweep_files.write_outcome(folder, point.name, outcome)
    except Stopped:
        storage.release_claim(store, claim.trial, 'stopped')
        raise
    storage.finish_claim(store, claim.trial, outcome)


def _draw_point(
    progress: SweepProgress, store: storage.ClaimStore, number: int, trial: Trial
) -> tuple[Point, Outcome | None]:
    """Draw a point of a search, and return it with its outcome if it need not be trained, else with None.

    A point is not trained if the search gives no valid config, or if a point with the same config is done.
    """
    plan = progress.plan
    try:
        search = configs.experiment_functions(plan.config, 'search_')[plan.sweep[0]]
        with storage.convert_database_errors(store):
            overrides = search(trial)
        config = points.point_config(plan.config, plan.overrides, overrides)
        overrides = points.typed_overrides(config, overrides)
        outcome = _outcome_of_same_config(progress, number, config)
    except database.DatabaseFailed:
        raise
    except (Exception, SystemExit) as error:  # the user's search function may raise anything
        overrides, outcome = {}, _failed_outcome(plan, error, 0.0)
    if earlier := progress.read_drawn_point(number):
        return Point(*(earlier[field] for field in Point._fields)), outcome
    point = Point(number, points.point_name(overrides, number), overrides)
    tree = point._asdict() | search_space.record_draws(trial)
    sweep_files.write_json(sweep_files.point_folder(progress.folder, point.name) / 'point.json', tree)
    return point, outcome


def _outcome_of_same_config(progress: SweepProgress, number: int, config: ConfigDict) -> Outcome | None:
    """Return the outcome of another point with the same config; training it again would give the same numbers."""
    if (same := progress.find_same_config(number, config)) is None:
        return None
    other, outcome = same
    return replace(outcome, seconds=0.0, reason=f'not trained: its config is that of point {other}')


def _report_evaluation(
    progress: SweepProgress,
    store: storage.ClaimStore,
    trial: Trial,
    point: Point,
    step: int,
    scores: dict[str, float],
) -> None:
    """Report an evaluation to the pruner under its number, from 1; raise Pruned if the pruner stops the run."""
    number = len(_read_evaluations(sweep_files.run_folder(progress.folder, point.name)))
    with storage.convert_database_errors(store):
        is_pruned = storage.report_evaluation(store, trial, number, scores[progress.plan.metric])
    if is_pruned:
        raise Pruned(f'pruned at step {step}')


def _run(
    progress: SweepProgress,
    point: Point,
    signals: StopSignals,
    on_evaluation: EvaluationCallback = _ignore_evaluation,
    send_heartbeat: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Train a point, or resume it, and write its outcome; the output of the run goes to the point's log."""
    folder, plan = progress.folder, progress.plan
    workdir = sweep_files.run_folder(folder, point.name)
    seconds_before = sweep_files.read_training_seconds(folder, point.name)
    start_time, start_clock = time.time(), time.monotonic()

    def training_seconds() -> float:
        return seconds_before + time.monotonic() - start_clock

    def write_running(running: bool) -> None:
        sweep_files.write_running(folder, point.name, running, start_time, training_seconds())

    log = sweep_files.point_folder(folder, point.name) / 'log.txt'
    try:
        with _redirected_output(log), _heartbeats(write_running, send_heartbeat):
            outcome = _train(plan, point, workdir, signals, on_evaluation, training_seconds)
            sweep_files.write_outcome(folder, point.name, outcome)
    except (Stopped, database.DatabaseFailed):
        write_running(False)
        raise
    gc.collect()  # frees the device arrays of this point before the next one starts
    return outcome


def _train(
    plan: SweepPlan,
    point: Point,
    workdir: Path,
    signals: StopSignals,
    on_evaluation: EvaluationCallback,
    training_seconds: Callable[[], float],
) -> Outcome:
    """Train a point and return its outcome, also if training fails."""
    try:
        config = points.point_config(plan.config, plan.overrides, point.overrides)
        with signals.raise_immediately():
            scores = run.train_run(config, workdir, watch=on_evaluation)
        value, step = scores[f'best_{plan.metric}'], int(scores['best_step'])
        return Outcome('done', plan.metric, plan.direction, value, step, training_seconds())
    except database.DatabaseFailed:
        raise
    except Pruned as pruned:
        print(pruned)
        return Outcome('pruned', plan.metric, plan.direction, *_best_evaluation(workdir, plan), training_seconds())
    except (Exception, SystemExit) as error:  # a failed point must not end the worker
        traceback.print_exc()
        return _failed_outcome(plan, error, training_seconds())


def _failed_outcome(plan: SweepPlan, error: BaseException, seconds: float) -> Outcome:
    """Return the outcome of a point that failed with `error`; the log has the whole error with its traceback."""
    text = format_value(' '.join(str(error).split()))
    reason = text if isinstance(error, UserError | RunError) else f'{type(error).__name__}: {text}'
    reason = crop_text(reason, MAX_REASON_LENGTH)
    diverged_at = error.step if isinstance(error, Diverged) else None
    return Outcome('failed', plan.metric, plan.direction, None, None, seconds, reason, diverged_at)


def _best_evaluation(workdir: Path, plan: SweepPlan) -> tuple[float, int]:
    """Return score and step of the best evaluation of a run."""
    best_of = max if plan.direction == 'max' else min
    best = best_of(_read_evaluations(workdir), key=lambda record: record[plan.metric])
    return best[plan.metric], best['step']


def _read_evaluations(workdir: Path) -> list[dict[str, Any]]:
    return [record for record in metrics.read_metrics(workdir) if record['split'] == 'valid']


# The process


@contextmanager
def _redirected_output(path: Path) -> Iterator[None]:
    """Append everything written to standard output and standard error, also by C libraries, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open('ab') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, saved_descriptor in zip((1, 2), saved, strict=True):
            os.dup2(saved_descriptor, descriptor)
            os.close(saved_descriptor)


@contextmanager
def _heartbeats(write_running: Callable[[bool], None], send_heartbeat: Callable[[], bool]) -> Iterator[None]:
    """Write running.json at once, then every `HEARTBEAT_SECONDS` write it and send a heartbeat in a thread.

    Kills this process if `send_heartbeat` returns False, because then another worker has the point.
    """
    write_running(True)
    done = threading.Event()

    def run_thread() -> None:
        next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
        while not done.wait(POLL_SECONDS):
            if time.monotonic() < next_heartbeat:
                continue
            next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
            try:
                write_running(True)
                has_claim = send_heartbeat()
            except (Exception, Stopped) as error:  # the database or the disk may work again at the next heartbeat
                print(f'the heartbeat failed: {error}', file=sys.stderr)
                continue
            if not has_claim:
                print('another process has claimed this point, because no heartbeat arrived in time', file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=run_thread, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
