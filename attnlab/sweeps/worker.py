"""A process that runs a sweep's points one after the other, so that they share what is imported and compiled."""

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
"""Characters of the reason of a failure at most: a device that is out of memory explains itself in pages."""

POLL_SECONDS = 1.0
"""Seconds between two looks for a point, and between two at whether a sign of life is due."""


def run_points(board: SweepProgress, name: str, url: str) -> None:
    """Runs points until none is left that could be run, here or elsewhere.

    name: of the study in the database.  Raises Stopped where a signal asks to stop; what ran then has saved.  Raises
    RunError where the database fails.
    """
    plan = board.plan
    pruner = storage.create_pruner(plan.search['pruner'] if plan.search else 'none')
    with handle_stop_signals() as signals, ExitStack() as stack:
        store = storage.open_claim_store(url, name, plan.direction, board.folder / 'locks', pruner, signals.check)
        stack.callback(storage.close_claim_store, store)
        stack.enter_context(storage.convert_database_errors(store))
        while not all(board.ended(number) for number in board.numbers):
            signals.check()
            claim = storage.claim_point(store, board.numbers, board.ended, board.reached)
            if claim is None:
                time.sleep(POLL_SECONDS)
                continue
            with claim.lock:
                _claimed(board, store, claim, signals)
        signals.check()


def run_point(board: SweepProgress, number: int) -> Outcome:
    """Runs a point with no database; how it ended, also where that was before.

    Raises Stopped where a signal came, also where it came too late to stop the point.
    """
    if (held := storage.lock_point_file(board.folder / 'locks' / str(number))) is None:
        raise RunError(f'point {number} is run by another process')
    with held, handle_stop_signals() as signals:
        end = board.ended(number) or _run(board, board.plan.points[number], signals)
        signals.check()
        return end


# A point


def _claimed(board: SweepProgress, store: storage.ClaimStore, claim: storage.Claim, signals: StopSignals) -> None:
    """Runs a claimed point and tells the database what came of it."""
    watch: EvaluationCallback = lambda step, scores: None
    end = None
    if board.plan.search:
        seed: Any = board.plan.base.seed
        trial = storage.create_search_trial(store, claim, board.plan.search['sampler'], seed)
        point, end = _drawn(board, store, claim.point, trial)
        watch = partial(_report, board, store, trial, point)
    else:
        point = board.plan.points[claim.point]
    if end is None and claim.kills >= storage.MAX_KILLS:
        reason = f'its worker was killed {claim.kills} times with no step saved in between'
        end = _failed(board.plan, RunError(reason), sweep_files.read_training_seconds(board.folder, point.name))
    try:
        if end is None:
            end = _run(board, point, signals, watch, lambda: storage.send_heartbeat(store, claim.trial))
        else:
            sweep_files.write_outcome(board.folder, point.name, end)
    except Stopped:
        storage.release_claim(store, claim.trial, 'stopped')
        raise
    storage.finish_claim(store, claim.trial, end)


def _drawn(board: SweepProgress, store: storage.ClaimStore, number: int, trial: Trial) -> tuple[Point, Outcome | None]:
    """The point that a search makes of a trial, and its outcome where there is nothing to train.

    That is so where the search makes no config, and where a point with the same config is done.
    """
    plan = board.plan
    try:
        search = configs.experiment_functions(plan.config, 'search_')[plan.sweep[0]]
        with storage.convert_database_errors(store):
            overrides = search(trial)
        config = points.point_config(plan.config, plan.overrides, overrides)
        overrides, end = points.typed_overrides(config, overrides), _of_another(board, number, config)
    except database.DatabaseFailed:
        raise
    except (Exception, SystemExit) as error:  # whatever the experiment's author raises
        overrides, end = {}, _failed(plan, error, 0.0)
    if before := board.begun(number):
        return Point(*(before[field] for field in Point._fields)), end
    point = Point(number, points.point_name(overrides, number), overrides)
    tree = point._asdict() | search_space.record_draws(trial)
    sweep_files.write_json(sweep_files.point_folder(board.folder, point.name) / 'point.json', tree)
    return point, end


def _of_another(board: SweepProgress, number: int, config: ConfigDict) -> Outcome | None:
    """The outcome of another point with the same config: the same seed gives the same numbers once more."""
    if (found := board.same(number, config)) is None:
        return None
    other, end = found
    return replace(end, seconds=0.0, reason=f'not trained: its config is that of point {other}')


def _report(
    board: SweepProgress, store: storage.ClaimStore, trial: Trial, point: Point, step: int, scores: dict[str, float]
) -> None:
    """Tells a trial of an evaluation, by its number from 1, and ends the run where the pruner says so."""
    number = len(_evaluations(sweep_files.run_folder(board.folder, point.name)))
    with storage.convert_database_errors(store):
        ends = storage.report_evaluation(store, trial, number, scores[board.plan.metric])
    if ends:
        raise Pruned(f'pruned at step {step}')


def _run(
    board: SweepProgress,
    point: Point,
    signals: StopSignals,
    watch: EvaluationCallback = lambda step, scores: None,
    beat: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Trains a point, or goes on with it, and writes how it ended; what is printed goes to its log."""
    folder, plan = board.folder, board.plan
    workdir, before = sweep_files.run_folder(folder, point.name), sweep_files.read_training_seconds(folder, point.name)
    started, clock = time.time(), time.monotonic()
    spent = lambda: before + time.monotonic() - clock
    says = lambda running: sweep_files.write_running(folder, point.name, running, started, spent())
    try:
        with _log(sweep_files.point_folder(folder, point.name) / 'log.txt'), _beating(says, beat):
            end = _trained(plan, point, workdir, signals, watch, spent)
            sweep_files.write_outcome(folder, point.name, end)
    except (Stopped, database.DatabaseFailed):
        says(False)
        raise
    gc.collect()  # the arrays that the point leaves
    return end


def _trained(
    plan: SweepPlan,
    point: Point,
    workdir: Path,
    signals: StopSignals,
    watch: EvaluationCallback,
    spent: Callable[[], float],
) -> Outcome:
    try:
        config = points.point_config(plan.config, plan.overrides, point.overrides)
        with signals.raised():
            done = run.train_run(config, workdir, watch=watch)
        return Outcome(
            'done', plan.metric, plan.direction, done[f'best_{plan.metric}'], int(done['best_step']), spent()
        )
    except database.DatabaseFailed:
        raise
    except Pruned as wish:
        print(wish)
        return Outcome('pruned', plan.metric, plan.direction, *_best(workdir, plan), spent())
    except (Exception, SystemExit) as error:  # whatever it is, the other points are run
        traceback.print_exc()
        return _failed(plan, error, spent())


def _failed(plan: SweepPlan, error: BaseException, seconds: float) -> Outcome:
    text = format_value(' '.join(str(error).split()))
    reason = text if isinstance(error, UserError | RunError) else f'{type(error).__name__}: {text}'
    reason = crop_text(reason, MAX_REASON_LENGTH)  # all of it, with the traceback, is in the point's log
    diverged_at = error.step if isinstance(error, Diverged) else None
    return Outcome('failed', plan.metric, plan.direction, None, None, seconds, reason, diverged_at)


def _best(workdir: Path, plan: SweepPlan) -> tuple[float, int]:
    found = _evaluations(workdir)
    best = (max if plan.direction == 'max' else min)(found, key=lambda record: record[plan.metric])
    return best[plan.metric], best['step']


def _evaluations(workdir: Path) -> list[dict[str, Any]]:
    return [record for record in metrics.read_metrics(workdir) if record['split'] == 'valid']


# The process


@contextmanager
def _log(path: Path) -> Iterator[None]:
    """What is written to the screen meanwhile goes to a file, whoever writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with path.open('ab') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


@contextmanager
def _beating(says: Callable[[bool], None], beat: Callable[[], bool]) -> Iterator[None]:
    """Signs of life beside a point's training, the first at once; ends the process where the point is no longer its."""
    says(True)
    done = threading.Event()

    def signs() -> None:
        next_one = time.monotonic() + HEARTBEAT_SECONDS
        while not done.wait(POLL_SECONDS):
            if time.monotonic() < next_one:
                continue
            next_one = time.monotonic() + HEARTBEAT_SECONDS
            try:
                says(True)
                mine = beat()
            except (Exception, Stopped) as error:  # a database that is away for a moment, a disk that is full for one
                print(f'no sign of life: {error}', file=sys.stderr)
                continue
            if not mine:
                print('another process has taken this point, as nothing was heard of this one', file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=signs, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
