"""Public names are unique and documented, and a function that takes or returns arrays documents their shapes."""

import ast
import re
from pathlib import Path

import pytest

import attnlab

PACKAGE = Path(attnlab.__file__).parent
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob('*.py'))
ARRAYS = {'Array', 'jax.Array', 'np.ndarray', 'numpy.ndarray'}
SHAPE = re.compile(r'\[|\bshape')  # [B, T], or 'of any shape'
KEYS = {'rng', 'key', 'dropout_rng'}  # PRNG keys, which have no axes
FLAX = {'setup', '__call__'}  # described by the module's own docstring where theirs is absent


def interface_methods():
    """Names of the documented methods of protocols and base classes: an implementation need not repeat the text."""
    names = set()
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text('utf-8'))):
            if isinstance(node, ast.ClassDef) and any(
                base in ast.unparse(each) for each in node.bases for base in ('Protocol', 'ABC', 'Section', 'Encoding')
            ):
                names |= {m.name for m in node.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
    return names


INHERITED = interface_methods()


def bare_arrays(node):
    """Whether an annotation of a function names an array type without the shape that jaxtyping would give."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [each.annotation for each in arguments if each.arg not in KEYS] + [node.returns]
    if any(ast.unparse(x).startswith('Callable[') for x in annotations if x):
        return False  # the arrays of a function that is passed
    shaped = [x for y in annotations if y for x in ast.walk(y) if isinstance(x, ast.Subscript) and _is_shaped(x)]
    inside = {id(x) for y in shaped for x in ast.walk(y)}
    return any(
        ast.unparse(x) in ARRAYS and id(x) not in inside
        for y in annotations if y for x in ast.walk(y) if isinstance(x, ast.Name | ast.Attribute)
    )  # fmt: skip


def _legend(node, module):
    """The module's docstring, if it explains every argument of a function."""
    text = ast.get_docstring(module) or ''
    return text if all(each.arg in text for each in node.args.args) else ''


def _is_shaped(node):
    return isinstance(node.slice, ast.Tuple) and isinstance(node.slice.elts[-1], ast.Constant)


def faults(source):
    """(name, fault) of each public definition of a module."""
    found, module = [], ast.parse(source)
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith('_'):
            text = ast.get_docstring(node) or ''
            if not text:
                found.append((node.name, 'no docstring'))
            is_bare = isinstance(node, ast.FunctionDef) and bare_arrays(node)
            if is_bare and not SHAPE.search(text + _legend(node, module)):
                found.append((node.name, 'no shapes'))
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
            for method in methods:
                own = ast.get_docstring(method) or ''
                if method.name.startswith('_') and method.name not in FLAX:
                    continue
                if not own and method.name not in INHERITED | FLAX:
                    found.append((f'{node.name}.{method.name}', 'no docstring'))
                if bare_arrays(method) and not SHAPE.search(own + text) and method.name not in INHERITED:
                    found.append((f'{node.name}.{method.name}', 'no shapes'))
    return found


@pytest.mark.parametrize('file', FILES)
def test_public_names_are_documented(file):
    if 'torch' not in file:  # the peers of the benchmarks: PyTorch's own interfaces
        assert not faults((PACKAGE / file).read_text('utf-8'))


def test_faults_are_seen():
    source = 'def f(x: np.ndarray) -> int:\n    """Sum."""\n\ndef g(): pass\n\n'
    source += 'class C:\n    """A."""\n    def m(self): pass\n'
    assert faults(source) == [('f', 'no shapes'), ('g', 'no docstring'), ('C.m', 'no docstring')]
    assert not faults('def f(x: Float[Array, "B T"]) -> int:\n    """Sum."""\n')


def test_public_names_are_unique():
    """A name that several modules share cannot be searched for.  Modules of one interface share its names."""
    interfaces = {'main', 'dot_product', 'is_preferred'}
    modules = {}
    for file in FILES:
        if 'torch' in file:
            continue
        for node in ast.parse((PACKAGE / file).read_text('utf-8')).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith('_'):
                modules.setdefault(node.name, []).append(file)
    assert not {name: found for name, found in modules.items() if len(found) > 1 and name not in interfaces}
