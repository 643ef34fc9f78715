"""Door 3: `FisherEmbedding`, similarity of networks, distillation, probes."""

from linnet.fisher.comparison import similarity
from linnet.fisher.distillation import Distilled, EmbeddingHead, WithEmbedding, distill, distill_loss
from linnet.fisher.embedding import FisherEmbedding
from linnet.fisher.fisher_product import fisher_vector_product
from linnet.fisher.probes import Spectrum, kernel_features, linear_probe, spectrum, top_projections
from linnet.fisher.statistics import Statistics, fisher_statistics

__all__ = [
    "Distilled",
    "EmbeddingHead",
    "FisherEmbedding",
    "Spectrum",
    "Statistics",
    "WithEmbedding",
    "distill",
    "distill_loss",
    "fisher_statistics",
    "fisher_vector_product",
    "kernel_features",
    "linear_probe",
    "similarity",
    "spectrum",
    "top_projections",
]
