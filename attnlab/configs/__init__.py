"""Configs: frozen dataclasses of all fields (see `attnlab.configs.fields`), experiment files, and JSON; no JAX."""

from attnlab.configs.align import (
    AlignConfig,
    DecodeConfig,
    GrammarPairs,
    Multi30kData,
    PairFiles,
    RecurrentConfig,
    TranslatorConfig,
)
from attnlab.configs.block import BlockConfig, TextConfig
from attnlab.configs.experiment import experiment_functions, load_experiment
from attnlab.configs.fields import Section, config_dict, field
from attnlab.configs.language import GrammarText, LanguageConfig, LanguageModelConfig, ShakespeareData, TextFile
from attnlab.configs.run import OptimizerConfig, RunConfig, TrainConfig
from attnlab.configs.serialization import check_same_config, config_from_json, config_to_json, load_config, save_config
from attnlab.configs.vision import (
    VIT_SIZES,
    Cifar10Data,
    Cifar100Data,
    DigitsData,
    ImageFiles,
    ResNetConfig,
    VisionConfig,
    VitConfig,
)

__all__ = [
    'VIT_SIZES', 'AlignConfig', 'BlockConfig', 'Cifar100Data', 'Cifar10Data', 'DecodeConfig', 'DigitsData',
    'GrammarPairs', 'GrammarText', 'ImageFiles', 'LanguageConfig', 'LanguageModelConfig', 'Multi30kData',
    'OptimizerConfig', 'PairFiles', 'RecurrentConfig', 'ResNetConfig', 'RunConfig', 'Section', 'ShakespeareData',
    'TextConfig', 'TextFile', 'TrainConfig', 'TranslatorConfig', 'VisionConfig', 'VitConfig', 'check_same_config',
    'config_dict', 'config_from_json', 'config_to_json', 'experiment_functions', 'field', 'load_config',
    'load_experiment', 'save_config',
]  # fmt: skip
