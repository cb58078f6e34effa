"""`python -m attnlab COMMAND` does the same as `attnlab COMMAND`."""

import sys

if __name__ == '__main__':
    if __package__ and not sys.flags.safe_path:
        del sys.path[0]  # the current folder: a random.py there would be imported instead of the standard library's
    elif not __package__:
        # Started by the path of this file, as `environment.attnlab_command` does.  The package may not be installed.
        sys.path.insert(0, __file__.rpartition('attnlab')[0] or '.')
        import attnlab  # noqa: F401  (its submodules are found through its path)

        del sys.path[0]
    from attnlab.cli import main

    sys.exit(main())
