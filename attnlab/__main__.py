"""`python -m attnlab COMMAND` is `attnlab COMMAND`."""

import sys

if __name__ == '__main__':
    if __package__ and not sys.flags.safe_path:
        del sys.path[0]  # the current folder, where a random.py would stand for the standard library's
    elif (
        not __package__
    ):  # started by its path, as `environment.attnlab_command` does; the package need not be installed
        sys.path.insert(0, __file__.rpartition('attnlab')[0] or '.')
        import attnlab  # noqa: F401  (its other modules are found through it)

        del sys.path[0]
    from attnlab.cli import main

    sys.exit(main())
