"""Numbers of an example that a Fisher embedding differentiates: classifier, energy, GAN, VAE, flow, autoregressive."""

from linnet.scores.scores import (
    Autoregressive,
    Classifier,
    Energy,
    Flow,
    Gan,
    Score,
    Vae,
    as_score,
    autoregressive,
    classifier,
    energy,
    flow,
    from_settings,
    gan,
    vae,
)

__all__ = [
    "Autoregressive",
    "Classifier",
    "Energy",
    "Flow",
    "Gan",
    "Score",
    "Vae",
    "as_score",
    "autoregressive",
    "classifier",
    "energy",
    "flow",
    "from_settings",
    "gan",
    "vae",
]
