"""Makes recurrent.npz beside this file, with PyTorch: python tests/golden/make_recurrent.py

One vector of parameters and one of gradients a model, both in the order of our parameter tree's sorted names.
"""

from pathlib import Path

import numpy as np
import torch

from attnlab.bench.seq2seq_torch import Seq2Seq, loss

VOCABULARY, EMBEDDING, HIDDEN, SMOOTHING = 7, 4, 3, 0.1
SOURCE = [[4, 5, 6, 4, 3], [6, 5, 3, 0, 0], [5, 3, 0, 0, 0]]
LABELS = [[5, 3, 0, 0], [4, 6, 5, 3], [6, 4, 3, 0]]
INPUTS = [[2, 5, 0, 0], [2, 4, 6, 5], [2, 6, 4, 0]]


def main() -> None:
    out = {'source': np.array(SOURCE, np.int32), 'labels': np.array(LABELS, np.int32)}
    out |= {'inputs': np.array(INPUTS, np.int32), 'smoothing': np.float32(SMOOTHING)}
    source, inputs, labels = (torch.tensor(x) for x in (SOURCE, INPUTS, LABELS))
    for cell in ('gru', 'lstm'):
        for attention in ('additive', 'dot', 'none'):
            torch.manual_seed(len(out))
            model = Seq2Seq(VOCABULARY, VOCABULARY, cell, EMBEDDING, HIDDEN, 1, True, False, attention, 0.0)
            with torch.no_grad():
                for name, x in model.named_parameters():
                    x.normal_(std=0.7)
                    if cell == 'lstm' and 'bias_ih' in name:
                        x.zero_()  # one of the two biases of PyTorch's LSTM is enough
                logits, weights = model(source, inputs)
            value = loss(model, source, inputs, labels, SMOOTHING)
            value.backward()
            found = {'logits': logits.numpy(), 'weights': weights.numpy(), 'loss': np.float32(value.item())}
            found['params'] = flat({name: x.detach().numpy() for name, x in model.named_parameters()}, cell)
            found['gradients'] = flat({name: x.grad.numpy() for name, x in model.named_parameters()}, cell)
            out |= {f'{cell}/{attention}/{key}': x for key, x in found.items()}
    np.savez_compressed(Path(__file__).with_name('recurrent.npz'), **out)


def flat(named: dict[str, np.ndarray], cell: str) -> np.ndarray:
    """PyTorch's arrays as one vector in the order of our tree, level by level, with our layout of each."""
    tree = {}
    for name, x in named.items():
        tree |= {ours: value.T.ravel() for ours, value in entries(name.split('.'), x, cell)}
    return np.concatenate([tree[name] for name in sorted(tree)])


def entries(name: list[str], x: np.ndarray, cell: str) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """Our names of one of PyTorch's arrays, each with its part, not yet transposed."""
    match name:
        case ['bias']:
            return [(('bias',), x)]
        case ['embed_source' | 'embed_target' as side, _]:
            return [((side, 'embedding'), x.T)]
        case ['start' | 'read' as layer, part]:
            return [((layer, {'weight': 'kernel'}.get(part, part)), x)]
        case ['attend', 'vector', _]:
            return [(('step', 'attend', 'vector'), x)]
        case ['attend', layer, part]:
            return [(('step', 'attend', layer, {'weight': 'kernel'}.get(part, part)), x)]
        case ['encoder', part]:
            run = 'backward_0' if part.endswith('_reverse') else 'forward_0'
            return gates(('encoder', run, 'cell', cell), part, x)
        case ['decoder', part]:
            return gates(('step', 'recurrence', cell), part, x)
        case _:
            raise ValueError(f'{name} is no parameter of the model')


def gates(path: tuple[str, ...], part: str, x: np.ndarray) -> list[tuple[tuple[str, ...], np.ndarray]]:
    kind = 'kernel' if part.startswith('weight') else 'bias'
    side = 'input' if '_ih' in part else 'hidden'
    if path[-1] == 'gru':
        return [((*path, side, kind), x)]
    if (side, kind) == ('input', 'bias'):
        return []
    return [((*path, side[0] + gate, kind), each) for gate, each in zip('ifgo', np.split(x, 4), strict=True)]


if __name__ == '__main__':
    main()
