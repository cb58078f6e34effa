"""Write docs/api.md, the signature and docstring of every name that `import attnlab` offers.

python -m attnlab.api > docs/api.md
"""

import ast
import inspect
from pathlib import Path

import attnlab

WIDTH = 100
"""Characters of the longest signature that stands on one line."""


def api_markdown() -> str:
    """Return the text of docs/api.md, read from the source files; nothing but `attnlab` itself is imported."""
    lines = [
        '# API', '',
        'Every name of `import attnlab`, by module. Written by `python -m attnlab.api > docs/api.md`.', '',
        'Letters of shapes: ' + ' '.join(_letters()),
    ]  # fmt: skip
    folder = Path(__file__).parent
    exports: dict[str, tuple[str, ...]] = attnlab.EXPORTS
    for module, names in exports.items():
        tree = ast.parse((folder / f'{module.replace(".", "/")}.py').read_text('utf-8'))
        definitions = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        title = (ast.get_docstring(tree) or '').split('\n')[0]
        lines += ['', f'## attnlab.{module}', '', title]
        for name in names:
            lines += ['', f'### {name}', '', *_entry(name, definitions[attnlab.RENAMED.get(name, name)])]
    return '\n'.join(lines) + '\n'


def _letters() -> list[str]:
    """The lines of the package's docstring that explain the letters."""
    return (attnlab.__doc__ or '').strip().split('\n\n')[-1].splitlines()


def _entry(name: str, node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return _block('python', [*_signature(name, node)]) + _block('text', _docstring(node))
    fields = [f'    {ast.unparse(each)}' for each in node.body if isinstance(each, ast.AnnAssign)]
    bases = ', '.join(map(ast.unparse, node.bases))
    lines = _block('python', [f'class {name}({bases}):' if bases else f'class {name}:', *fields])
    lines += _block('text', _docstring(node))
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and _is_documented(method):
            decorators = [f'@{ast.unparse(each)}' for each in method.decorator_list if ast.unparse(each) == 'property']
            lines += _block('python', [*decorators, *_signature(f'{name}.{method.name}', method)])
            lines += _block('text', _docstring(method))
    return lines


def _is_documented(method: ast.FunctionDef) -> bool:
    is_public = not method.name.startswith('_') or method.name == '__call__'
    return is_public and ast.get_docstring(method) is not None


def _signature(name: str, node: ast.FunctionDef) -> list[str]:
    """The call of a function, on one line or with an argument on each line."""
    arguments = [each for each in _arguments(node.args) if each != 'self']
    returns = f' -> {ast.unparse(node.returns)}' if node.returns else ''
    line = f'{name}({", ".join(arguments)}){returns}'
    if len(line) <= WIDTH:
        return [line]
    return [f'{name}(', *(f'    {each},' for each in arguments), f'){returns}']


def _arguments(arguments: ast.arguments) -> list[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [_argument(each, default) for each, default in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        texts.append(f'*{ast.unparse(arguments.vararg)}')
    elif arguments.kwonlyargs:
        texts.append('*')
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    texts += [_argument(each, default) for each, default in pairs]
    return texts + ([f'**{ast.unparse(arguments.kwarg)}'] if arguments.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    equals = ' = ' if argument.annotation else '='
    return f'{ast.unparse(argument)}{equals}{ast.unparse(default)}'


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return inspect.cleandoc(ast.get_docstring(node) or '').splitlines()


def _block(language: str, lines: list[str]) -> list[str]:
    return [f'```{language}', *lines, '```', ''] if lines else []


if __name__ == '__main__':
    print(api_markdown(), end='')
