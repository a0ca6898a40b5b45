"""What a cache will take, before there is one: bytes from a model's config alone, and which mode fits."""

from .modes import Advice, Outlook, advise
from .prediction import Prediction, predict
from .probe import Probe, probe

__all__ = ["Advice", "Outlook", "Prediction", "Probe", "advise", "predict", "probe"]
