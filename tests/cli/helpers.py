"""Command lines that are refused, and the scores that a stubbed evaluation returns."""

from attnlab import cli
from tests.toy import tree

SCORES = {'bleu': 12.5, 'bleu_signature': 'nrefs:1', 'sentences': 7, 'parameters': 1234, 'step': 9}


def refused(capsys, *argv: str) -> str:
    """Run a command line that is refused and writes nothing; return the error line without `attnlab: `."""
    before = tree()
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert err.startswith('attnlab: ')
    assert err.count('\n') == 1
    assert err.endswith('\n')
    assert tree() == before
    return err.removeprefix('attnlab: ').rstrip('\n')
