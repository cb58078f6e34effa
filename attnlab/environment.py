"""What a process asks of its system and of JAX before either starts to compute."""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

_DEVICES = 'force_host_platform_device_count'
_LAUNCHER = 'ATTNLAB_LAUNCHER'

is_distributed = False
"""Whether this process has joined others for a training (`attnlab.train.processes.join_processes`)."""

MAX_CPU_DEVICES = 8
"""At most so many cores of a CPU are devices of their own, which share a batch; each uses the others' cores too."""


def enable_large_pages() -> None:
    """Starts the process once more with memory in large pages, for which glibc takes a wish at the start only.

    A training step on a CPU takes and returns large arrays.  Who sets GLIBC_TUNABLES, to whatever, has no second start.
    """
    if sys.platform == 'linux' and sys.executable and 'GLIBC_TUNABLES' not in os.environ:
        os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=1'
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def attnlab_command(*argv: str) -> list[str]:
    """The command line of a process of this copy of the package.

    With -P no folder of the user comes first in sys.path: `python -m attnlab` would import a random.py or jax.py of the
    current folder in place of the real one.
    """
    return [sys.executable, '-P', str(Path(__file__).with_name('__main__.py')), *argv]


def open_standard_streams() -> None:
    """Opens the null device in place of each closed standard stream, and prints unknown characters as escapes.

    The number of a closed stream would be that of the next file that is opened, which then gets what libraries print.
    """
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        if getattr(sys, name) is None:
            stream = open(os.devnull, 'w' if number else 'r')  # noqa: SIM115  (open until the process ends)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')


def configure_process(processes: int = 1, number: int = 0) -> None:
    """Log lines of ours on the screen, compiled programs kept from one start to the next, and a device a core.

    processes, number: so many share the cores, and which of them this is; log lines are the first one's.
    """
    logging.basicConfig(level=logging.WARNING if number else logging.INFO, format='%(message)s')
    # Not of 'jax': before JAX is imported that would be the level of what jaxlib logs, too.
    logging.getLogger('jax._src').setLevel(logging.WARNING)
    for library in ('absl', 'asyncio'):  # orbax's, which raises what it logs, and logs it with tracebacks of threads
        logging.getLogger(library).setLevel(logging.CRITICAL)
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'attnlab' / 'jax'
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(cache))
    # JAX keeps only what took it a second; half of a small experiment's start is programs below that.
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
    # jaxlib 0.10 logs two lines an error for each program that it reads from the cache on some processors, where LLVM's
    # preferences (prefer-no-gather) are no features of the host.  What fails raises besides.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
        usable = getattr(os, 'sched_getaffinity', None)  # Linux: what a container allows, not what the machine has
        cores = len(usable(0)) if usable else os.cpu_count() or 1
        # The devices of a busy machine may wait for each other longer than the 40 seconds after which XLA gives up.
        wish = f'--xla_{_DEVICES}={min(max(cores // processes, 1), MAX_CPU_DEVICES)}'
        _add_flags(wish, '--xla_cpu_collective_call_terminate_timeout_seconds=600')


def print_error(line: str) -> None:
    """Write `attnlab: LINE` to the standard error in one call, so that no other process or thread writes into it."""
    sys.stderr.write(f'attnlab: {line}\n')
    sys.stderr.flush()


def restrict_hardware(number: int, count: int) -> None:
    """Leaves to this process its part, `number` of `count`, of the cores and NVIDIA GPUs that it may use.

    Before `configure_process`, and before JAX is imported.  Where there are fewer than processes, several share one.
    """
    if hasattr(os, 'sched_setaffinity'):
        cores = sorted(os.sched_getaffinity(0), key=_place)
        os.sched_setaffinity(0, _part(cores, number, count))
    gpus = _gpus()
    if gpus:
        os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(_part(gpus, number, count))
        if len(gpus) < count:  # one process alone takes three quarters of a GPU's memory, at once
            on_one = -(-count // len(gpus))
            os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{0.9 / on_one:.3f}')


def _part(things: list[Any], number: int, count: int) -> list[Any]:
    """Consecutive ones; the first parts have one more where they cannot be alike."""
    if len(things) < count:
        return [things[number % len(things)]]
    whole, more = divmod(len(things), count)
    start = number * whole + min(number, more)
    return things[start : start + whole + (number < more)]


def _place(core: int) -> tuple[int, ...]:
    """Sorts the threads of a core, and the cores of a socket, side by side."""
    try:
        folder = Path(f'/sys/devices/system/cpu/cpu{core}/topology')
        names = ('physical_package_id', 'core_id')
        return *(int((folder / name).read_text()) for name in names), core
    except (OSError, ValueError):
        return 0, core, core


def _gpus() -> list[str]:
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if visible is not None:
        return [each for each in visible.split(',') if each and each != '-1']
    return [str(number) for number, _ in enumerate(Path('/proc/driver/nvidia/gpus').glob('*'))]


def exit_now(code: int) -> NoReturn:
    """Ends the process at once, with nothing waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a pipe that nobody reads any more, a full disk
            stream.flush()
    os._exit(code)


def exit_on_interrupt() -> None:
    """Ends the process at once, in one line, when SIGINT comes, unless it was started to ignore that.

    Python's own handler raises KeyboardInterrupt wherever the program stands: in the midst of an import or of a
    callback of JAX it becomes another error or is dropped, and while the program ends it prints a traceback.  Clean-up
    is not needed: every file is written so that SIGKILL may come at any time.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return

    def interrupted(number: int, frame: object) -> None:
        drawn = os.isatty(2) and os.environ.get('TERM') != 'dumb'  # perhaps a bar, which hides the cursor
        os.write(2, (b'\x1b[?25h\n' if drawn else b'') + b'attnlab: interrupted\n')
        os._exit(128 + number)

    signal.signal(signal.SIGINT, interrupted)


def child_environment() -> dict[str, str]:
    """The environment of a process that is to stop, and save, once this one is gone."""
    return {**os.environ, _LAUNCHER: str(os.getpid())}


def stop_with_launcher() -> None:
    """Stops this process with SIGTERM once the one that started it in `child_environment` is gone, however it ended."""
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is None:
        return

    def look() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True).start()


def device_error() -> str | None:
    """The reason for which JAX has no device, in one line; None where it has one, or was not imported."""
    jax = sys.modules.get('jax')
    if jax is None:
        return None
    try:
        jax.devices()
    except Exception as error:  # an AssertionError without a text for 'cuda' where JAX was installed without CUDA
        reason = (str(error) or 'this JAX was installed without it').splitlines()[0].partition(' (set JAX_PLATFORMS')[0]
        came = os.environ.get('JAX_PLATFORMS', '')
        return f'JAX_PLATFORMS is {came!r}: {reason}; expected a platform of this machine, such as cpu'
    return None


def simulate_cpu_devices(devices: int) -> None:
    """So many devices of a CPU, to compile for; before any is used."""
    os.environ['JAX_PLATFORMS'] = 'cpu'
    if jax := sys.modules.get('jax'):  # which has read the variable already
        jax.config.update('jax_platforms', 'cpu')
    _add_flags(f'--xla_{_DEVICES}={devices}')  # the last one counts


def host_memory_bytes() -> int:
    """Bytes that the processes of this machine may use together: its RAM, or less where a control group has less."""
    limits = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    try:
        group = Path('/proc/self/cgroup').read_text().rpartition('::')[2].strip()
    except OSError:
        group = ''
    root = Path('/sys/fs/cgroup')
    folder = root / group.lstrip('/')
    for file in (
        *(each / 'memory.max' for each in (folder, *folder.parents) if each.is_relative_to(root)),
        root / 'memory' / 'memory.limit_in_bytes',  # version 1 of control groups
    ):
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # no such file, or no limit: 'max'
            continue
    return min(limits)


def _add_flags(*flags: str) -> None:
    os.environ['XLA_FLAGS'] = ' '.join([*os.environ.get('XLA_FLAGS', '').split(), *flags])
