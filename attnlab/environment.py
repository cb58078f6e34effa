"""Settings of the operating system and of JAX that a process makes before it computes anything."""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar('T')

_DEVICE_COUNT_FLAG = 'xla_force_host_platform_device_count'
_LAUNCHER_VARIABLE = 'ATTNLAB_LAUNCHER'

is_distributed = False
"""Whether this process is one of several that train together (`attnlab.train.processes.join_processes` sets it)."""

MAX_CPU_DEVICES = 8
"""Largest number of JAX devices on a CPU.  They share a batch; each also computes on the cores of the others."""


def enable_large_pages() -> None:
    """Start this process again with glibc's setting for large memory pages, which glibc reads only at the start.

    Large pages make training on a CPU faster: each step allocates and frees large arrays.  If GLIBC_TUNABLES is set, to
    any value, nothing happens.
    """
    if sys.platform == 'linux' and sys.executable and 'GLIBC_TUNABLES' not in os.environ:
        os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=1'
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def attnlab_command(*argv: str) -> list[str]:
    """Command line that runs `attnlab ARGV` with this copy of the package.

    The option -P keeps the current folder out of sys.path: with `python -m attnlab`, a random.py or jax.py in the
    current folder would be imported instead of the real module.
    """
    return [sys.executable, '-P', str(Path(__file__).with_name('__main__.py')), *argv]


def open_standard_streams() -> None:
    """Open the null device for each closed standard stream, and print characters that cannot be encoded as escapes.

    Without this, the next file that is opened would get the file descriptor of a closed stream, and the output of
    libraries would be written into that file.
    """
    for descriptor, name in enumerate(('stdin', 'stdout', 'stderr')):
        if getattr(sys, name) is None:
            stream = open(os.devnull, 'w' if descriptor else 'r')  # noqa: SIM115  (open until the process ends)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')


def configure_process(processes: int = 1, number: int = 0) -> None:
    """Set up logging, the cache of compiled programs and the CPU devices of this process; call before importing JAX.

    processes: number of processes that share the cores of this machine.
    number: index of this process among them; processes other than 0 log warnings and errors only.
    """
    logging.basicConfig(level=logging.WARNING if number else logging.INFO, format='%(message)s')
    # Not the logger 'jax': its level, if set before JAX is imported, also becomes the log level of jaxlib.
    logging.getLogger('jax._src').setLevel(logging.WARNING)
    # Loggers of orbax.  It logs errors with the tracebacks of its threads, and raises them as well.
    for library in ('absl', 'asyncio'):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'attnlab' / 'jax'
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(cache))
    # By default JAX caches only programs that took 1 s to compile.  Programs below that are half of the start of a
    # small experiment.
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
    # On some processors, jaxlib 0.10 logs two lines at level error for each program that it reads from the cache:
    # LLVM's tuning preferences (prefer-no-gather) are not among the features of the host.  Real failures raise as well.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    if _DEVICE_COUNT_FLAG not in os.environ.get('XLA_FLAGS', ''):
        get_affinity = getattr(os, 'sched_getaffinity', None)  # Linux: the cores that a container may use
        cores = len(get_affinity(0)) if get_affinity else os.cpu_count() or 1
        device_count = min(max(cores // processes, 1), MAX_CPU_DEVICES)
        # On a busy machine, devices may wait for each other longer than 40 seconds, after which XLA ends the process.
        _add_xla_flags(
            f'--{_DEVICE_COUNT_FLAG}={device_count}', '--xla_cpu_collective_call_terminate_timeout_seconds=600'
        )


def print_error(line: str) -> None:
    """Write `attnlab: LINE` to standard error in one call, so that output of other processes cannot land inside it."""
    sys.stderr.write(f'attnlab: {line}\n')
    sys.stderr.flush()


def restrict_hardware(number: int, count: int) -> None:
    """Restrict this process to part `number` of `count` of the cores and NVIDIA GPUs that it may use.

    Call before `configure_process`, and before JAX is imported.  If there are fewer cores or GPUs than processes,
    several processes share one.
    """
    if hasattr(os, 'sched_setaffinity'):
        cores = sorted(os.sched_getaffinity(0), key=_core_position)
        os.sched_setaffinity(0, _split_evenly(cores, number, count))
    gpus = _visible_gpus()
    if gpus:
        os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(_split_evenly(gpus, number, count))
        if len(gpus) < count:  # by default, one process allocates three quarters of the memory of a GPU at its start
            processes_per_gpu = -(-count // len(gpus))
            os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{0.9 / processes_per_gpu:.3f}')


def _split_evenly(items: list[T], number: int, count: int) -> list[T]:
    """Part `number` of `count` consecutive parts; the first parts have one more item if they cannot be equal."""
    if len(items) < count:
        return [items[number % len(items)]]
    size, remainder = divmod(len(items), count)
    start = number * size + min(number, remainder)
    return items[start : start + size + (number < remainder)]


def _core_position(core: int) -> tuple[int, ...]:
    """Sort key that puts the hardware threads of a core, and the cores of a socket, next to each other."""
    try:
        folder = Path(f'/sys/devices/system/cpu/cpu{core}/topology')
        names = ('physical_package_id', 'core_id')
        return *(int((folder / name).read_text()) for name in names), core
    except (OSError, ValueError):
        return 0, core, core


def _visible_gpus() -> list[str]:
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if visible is not None:
        return [gpu for gpu in visible.split(',') if gpu and gpu != '-1']
    return [str(number) for number, _ in enumerate(Path('/proc/driver/nvidia/gpus').glob('*'))]


def exit_now(code: int) -> NoReturn:
    """End this process at once, without waiting for threads or running clean-up handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of the pipe is gone, or the disk is full
            stream.flush()
    os._exit(code)


def exit_on_interrupt() -> None:
    """End this process at once, with a one-line message, on SIGINT, unless it was started with SIGINT ignored.

    Python's own handler raises KeyboardInterrupt at any point of the program.  During an import or in a callback of JAX
    it becomes another error or is dropped, and at the end of the program it prints a traceback.  No clean-up is needed:
    every file is written such that the process may be killed at any time.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return

    def handle_interrupt(number: int, frame: object) -> None:
        # A progress bar on the terminal may have hidden the cursor: show it again.
        may_have_bar = os.isatty(2) and os.environ.get('TERM') != 'dumb'
        os.write(2, (b'\x1b[?25h\n' if may_have_bar else b'') + b'attnlab: interrupted\n')
        os._exit(128 + number)

    signal.signal(signal.SIGINT, handle_interrupt)


def child_environment() -> dict[str, str]:
    """Environment variables for a child process that should save and stop when this process ends.

    The child calls `stop_with_launcher`.
    """
    return {**os.environ, _LAUNCHER_VARIABLE: str(os.getpid())}


def stop_with_launcher() -> None:
    """Watch the process that started this one with `child_environment`; send this one SIGTERM when that has ended.

    Does nothing if the process was started in another way.
    """
    launcher = os.environ.pop(_LAUNCHER_VARIABLE, None)
    if launcher is None:
        return

    def wait_for_launcher() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_launcher, daemon=True).start()


def device_error() -> str | None:
    """Return the reason why JAX has no device, in one line; None if it has one, or if JAX was not imported."""
    jax = sys.modules.get('jax')
    if jax is None:
        return None
    try:
        jax.devices()
    except Exception as error:  # for 'cuda' without CUDA support in JAX, an AssertionError without a message
        reason = (str(error) or 'this JAX was installed without it').splitlines()[0].partition(' (set JAX_PLATFORMS')[0]
        platforms = os.environ.get('JAX_PLATFORMS', '')
        return f'JAX_PLATFORMS is {platforms!r}: {reason}; expected a platform of this machine, such as cpu'
    return None


def simulate_cpu_devices(count: int) -> None:
    """Let JAX have `count` CPU devices, on any machine, to compile programs for; call before any device is used."""
    os.environ['JAX_PLATFORMS'] = 'cpu'
    if jax := sys.modules.get('jax'):  # an imported JAX has read the variable already
        jax.config.update('jax_platforms', 'cpu')
    _add_xla_flags(f'--{_DEVICE_COUNT_FLAG}={count}')  # of equal flags, XLA uses the last


def host_memory_bytes() -> int:
    """Return the memory in bytes that processes may use: the RAM of the machine, or the limit of their control group.

    The smallest of these numbers is returned.
    """
    limits = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    try:
        group = Path('/proc/self/cgroup').read_text().rpartition('::')[2].strip()
    except OSError:
        group = ''
    root = Path('/sys/fs/cgroup')
    group_folder = root / group.lstrip('/')
    for file in (
        *(folder / 'memory.max' for folder in (group_folder, *group_folder.parents) if folder.is_relative_to(root)),
        root / 'memory' / 'memory.limit_in_bytes',  # version 1 of control groups
    ):
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # no such file, or no limit: 'max'
            continue
    return min(limits)


def _add_xla_flags(*flags: str) -> None:
    os.environ['XLA_FLAGS'] = ' '.join([*os.environ.get('XLA_FLAGS', '').split(), *flags])
