"""Whole-slide training and evaluation, from a table of slides to heatmaps: ``python -m sft.wsi``.

The command line covers all steps (docs/wsi.md). Its parts can be used alone: tables and splits, exact augmentations of slides, heads,
checkpoints from which a killed run resumes with the same bits, metrics with intervals, heatmaps. Needs the extra ``wsi``.
"""

from typing import TYPE_CHECKING

from sft.common.lazy_exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from sft.wsi.config import AugmentConfig as AugmentConfig
    from sft.wsi.config import Config as Config
    from sft.wsi.config import DataConfig as DataConfig
    from sft.wsi.config import ModelConfig as ModelConfig
    from sft.wsi.config import RanksConfig as RanksConfig
    from sft.wsi.config import TaskConfig as TaskConfig
    from sft.wsi.config import TrainConfig as TrainConfig
    from sft.wsi.data.augment import Augmentation as Augmentation
    from sft.wsi.data.augment import draw_augmentation as draw_augmentation
    from sft.wsi.data.splits import assign_splits as assign_splits
    from sft.wsi.data.table import SlideRecord as SlideRecord
    from sft.wsi.data.table import SlideTable as SlideTable
    from sft.wsi.data.table import read_table as read_table
    from sft.wsi.data.transforms import Recoloured as Recoloured
    from sft.wsi.data.transforms import Turned as Turned
    from sft.wsi.errors import DatasetError as DatasetError
    from sft.wsi.errors import RunFolderError as RunFolderError
    from sft.wsi.errors import RunInterrupted as RunInterrupted
    from sft.wsi.errors import TrainingError as TrainingError
    from sft.wsi.eval.heatmap import HeatmapMaker as HeatmapMaker
    from sft.wsi.eval.metrics import Estimate as Estimate
    from sft.wsi.eval.metrics import Prediction as Prediction
    from sft.wsi.eval.metrics import evaluate_predictions as evaluate_predictions
    from sft.wsi.eval.predict import Predictor as Predictor
    from sft.wsi.model.backbones import cut_before_pooling as cut_before_pooling
    from sft.wsi.model.backbones import load_backbone as load_backbone
    from sft.wsi.model.bags import AttentionBagHead as AttentionBagHead
    from sft.wsi.model.bags import BagEvidence as BagEvidence
    from sft.wsi.model.bags import BagModel as BagModel
    from sft.wsi.model.bags import MaximumBagHead as MaximumBagHead
    from sft.wsi.model.bags import MeanBagHead as MeanBagHead
    from sft.wsi.model.bags import build_bag_model as build_bag_model
    from sft.wsi.model.heads import AttentionHead as AttentionHead
    from sft.wsi.model.heads import Evidence as Evidence
    from sft.wsi.model.heads import MaximumHead as MaximumHead
    from sft.wsi.model.heads import PooledHead as PooledHead
    from sft.wsi.model.heads import SegmentationHead as SegmentationHead
    from sft.wsi.model.heads import SlideModel as SlideModel
    from sft.wsi.model.heads import build_model as build_model
    from sft.wsi.model.tile_encoders import load_tile_encoder as load_tile_encoder
    from sft.wsi.run.folder import RunFolder as RunFolder
    from sft.wsi.train.checkpoint import CheckpointFolder as CheckpointFolder
    from sft.wsi.train.distributed import joined as joined
    from sft.wsi.train.experiment import Experiment as Experiment
    from sft.wsi.train.experiment import load_experiment as load_experiment
    from sft.wsi.train.signals import Interruption as Interruption
    from sft.wsi.train.trainer import Trainer as Trainer
else:
    __all__, __getattr__, __dir__ = _lazy_exports(
        "sft.wsi",
        {
            "sft.wsi.config": "AugmentConfig Config DataConfig ModelConfig RanksConfig TaskConfig TrainConfig",
            "sft.wsi.data.augment": "Augmentation draw_augmentation",
            "sft.wsi.data.splits": "assign_splits",
            "sft.wsi.data.table": "SlideRecord SlideTable read_table",
            "sft.wsi.data.transforms": "Recoloured Turned",
            "sft.wsi.errors": "DatasetError RunFolderError RunInterrupted TrainingError",
            "sft.wsi.eval.heatmap": "HeatmapMaker",
            "sft.wsi.eval.metrics": "Estimate Prediction evaluate_predictions",
            "sft.wsi.eval.predict": "Predictor",
            "sft.wsi.model.backbones": "cut_before_pooling load_backbone",
            "sft.wsi.model.bags": "AttentionBagHead BagEvidence BagModel MaximumBagHead MeanBagHead build_bag_model",
            "sft.wsi.model.heads": "AttentionHead Evidence MaximumHead PooledHead SegmentationHead SlideModel build_model",
            "sft.wsi.model.tile_encoders": "load_tile_encoder",
            "sft.wsi.run.folder": "RunFolder",
            "sft.wsi.train.checkpoint": "CheckpointFolder",
            "sft.wsi.train.distributed": "joined",
            "sft.wsi.train.experiment": "Experiment load_experiment",
            "sft.wsi.train.signals": "Interruption",
            "sft.wsi.train.trainer": "Trainer",
        },
        internal=("config", "data", "errors", "eval", "model", "run", "train"),
    )
