"""The points of a sweep: their values, unique names, and the checks before the first one runs."""

import itertools

import pytest

from attnlab import sweeps
from attnlab.errors import UserError
from attnlab.sweeps import points
from tests.sweeps.experiments import CHECKED


@pytest.fixture
def plan(experiment):
    config = experiment(CHECKED)
    return lambda *names, overrides=(), **search: points.make_sweep_plan(config, overrides, names, search)


def error_of(plan, *names, **options):
    """Return the error with which a plan is refused."""
    with pytest.raises(UserError) as caught:
        plan(*names, **options)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def overrides_of(sweep_plan):
    return [point.overrides for point in sweep_plan.points]


def test_grid_gives_every_combination():
    values = {'a': (1, 2), 'b.c': 'xy', 'd': (None,)}
    expected = [dict(zip(values, combination, strict=True)) for combination in itertools.product((1, 2), 'xy', (None,))]
    assert list(sweeps.grid(values)) == expected and len(expected) == 4


def test_zipped_chained_and_product_combine_points():
    pairs = list(sweeps.zipped({'a': (1, 2), 'b': (3, 4)}))
    assert pairs == [{'a': 1, 'b': 3}, {'a': 2, 'b': 4}]
    assert list(sweeps.chained(pairs, [{'c': 5}])) == [*pairs, {'c': 5}]
    combined = list(sweeps.product(pairs, iter([{'c': 5}, {'c': 6}])))
    assert combined == [{**pair, 'c': c} for pair in pairs for c in (5, 6)]
    with pytest.raises(ValueError, match="the same number of values for every key, got {'a': 2, 'b': 1}"):
        list(sweeps.zipped({'a': (1, 2), 'b': (3,)}))
    with pytest.raises(UserError, match='config.a is set by two sweeps of a product: to 1 and 9'):
        list(sweeps.product(pairs, [{'a': 9}]))


def test_values_have_the_types_of_their_fields(plan):
    sweep_plan = plan('rates')
    rates = [0.001, 0.001, 1.0, 1.0, 0.5, 0.5]
    attentions = ['additive', 'dot'] * 3
    assert overrides_of(sweep_plan) == [{'optimizer.learning_rate': rate, 'model.attention': attention}
                                for rate, attention in zip(rates, attentions, strict=True)]  # fmt: skip
    assert all(type(values['optimizer.learning_rate']) is float for values in overrides_of(sweep_plan))
    assert [point.number for point in sweep_plan.points] == list(range(6))
    assert sweep_plan.points[0].name == 'learning_rate=0.001,attention=additive'
    assert (sweep_plan.metric, sweep_plan.direction, sweep_plan.search) == ('bleu', 'max', None)


def test_several_sweeps_give_their_product(plan):
    sweep_plan = plan('seeds', 'sizes')
    sizes = ('hidden=8,embedding=4', 'hidden=16,embedding=6')
    assert [point.name for point in sweep_plan.points] == [f'seed={seed},{size}' for seed in range(3) for size in sizes]
    assert len(plan('both').points) == 5


def test_overrides_of_the_command_line_apply_to_every_point(plan):
    sweep_plan = plan('seeds', overrides=[('model.hidden', '20')])
    assert sweep_plan.base.model.hidden == 20 and overrides_of(sweep_plan) == [{'seed': seed} for seed in range(3)]
    error = error_of(plan, 'seeds', overrides=[('seed', '4')])
    assert error.endswith('config.seed is varied by the sweep, and --config.seed=4 sets it')


@pytest.mark.parametrize(('name', 'line'), [
    ('same', 'points 0 and 2 of the sweep are the same: seed=0'),
    ('equal', 'points 0 and 1 of the sweep are the same: seed=0'),
    ('none', '--sweep=none has no points'),
    ('typo', 'point 1 of the sweep (model.hiden=3): there is no config.model.hiden; did you mean config.model.hidden?'),
    ('kind', 'point 0 of the sweep (seed=1.5): seed is 1.5; expected an int'),
    ('bad', "point 1 of the sweep (model.attention=sideways): model.attention is 'sideways'"),
    ('rate', "point 1 of the sweep (optimizer.schedule=up): optimizer.schedule is 'up'"),
    ('mesh', "point 1 of the sweep (train.mesh=data=3): train.mesh is 'data=3'"),
    ('list', 'a point of a sweep is a dict dotted key -> value, got 3'),
    ('fails', "--sweep=fails fails: AttributeError: 'int' object has no attribute 'values'"),
    ('odd', "--sweep=odd fails: ValueError: zipped expects the same number of values for every key, got {'"),
    ('seed', "has no sweep 'seed'; did you mean seeds?"),
    ('twice', 'has both sweep_twice and search_twice'),
    ('', "has no sweep ''"),
])  # fmt: skip
def test_an_invalid_point_is_error_of(plan, name, line):
    assert line in error_of(plan, name)


def test_two_sweeps_that_set_the_same_key_are_error_of(plan):
    assert error_of(plan, 'seeds', 'seeds').endswith('config.seed is set by two sweeps of a product: to 0 and 0')


def test_a_search(plan):
    sweep_plan = plan('space', trials=7, pruner='asha')
    assert sweep_plan.points == [] and sweep_plan.search == {'trials': 7, 'sampler': 'tpe', 'pruner': 'asha'}
    assert error_of(plan, 'space', 'seeds') == '--sweep=space,seeds: a search cannot be combined with other names'
    assert error_of(plan, 'seeds', trials=7) == '--trials applies to a search only; seeds is not a search'


def test_point_names_are_valid_folder_names(tmp_path):
    name = points.point_name({'a.start': 'runs/b', 'a.end': 'x y', 'z.end': 'é'})
    assert name == 'a.start=runs%2fb,a.end=x%20y,z.end=%c3%a9'
    assert points.point_name({'m.shape': (2, 3), 'm.bias': False, 'm.pool': None}) == 'shape=2x3,bias=false,pool=None'
    assert points.point_name({}) == 'base'
    assert points.point_name({'o.rate': 0.00123456789}, 7) == '0007,rate=0.001235'
    long = [points.point_name({'m.text': 'x' * 500 + end}) for end in 'ab']
    assert len(set(long)) == 2 and all(len(name) == points.MAX_NAME_LENGTH for name in long)
    (tmp_path / long[0] / name).mkdir(parents=True)


def test_names_that_differ_only_in_case_get_a_number():
    alike = [points.Point(i, name, {}) for i, name in enumerate(['a=x', 'a=X', 'a=y'])]
    assert [point.name for point in points._with_unique_names(alike)] == ['a=x-0', 'a=X-1', 'a=y']


def test_an_experiment_without_sweeps_is_refused_with_a_hint(experiment):
    with pytest.raises(UserError, match=r"has no sweep 'x'; it has neither sweep_NAME\(\) nor search_NAME\(trial\)"):
        points.make_sweep_plan(experiment(''), [], ['x'], {})
