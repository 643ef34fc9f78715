"""How unsure a classifier is of an input, for every estimator of classes and for ensembles of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sklearn.utils.validation import check_is_fitted

from linnet._common import together
from linnet._estimator.ensembles import by_members, convert_scores
from linnet.probability import (
    Bernoulli,
    Categorical,
    ClassBeliefs,
    Likelihood,
    Ordinal,
    Posterior,
    Sites,
    Spread,
    UncertaintyScore,
    check_score,
    describe_classes,
    describe_likelihood,
    make_rule,
)


class ClassUncertaintyMixin:
    """Scores that say of which inputs a classifier is unsure, such as inputs of a kind that it has not seen."""

    likelihood_: Any
    posterior_: Posterior
    variance_: str
    memory: float | str
    seed: int

    @by_members
    @together
    def uncertainty(
        self, X: Any, score: UncertaintyScore | Sequence[UncertaintyScore] = "moderated_energy", *, draws: int = 1000
    ) -> Any:
        r"""How unsure the classifier is of each input, (n,): larger for an input that is less known.

        Args:
            X: Inputs.
            score: "moderated_energy" (minus the logsumexp of logits that are scaled down by their variances),
                "max_probability" (one less the largest probability), "entropy" (of the averaged probabilities),
                "expected_entropy" (the average of the entropies: the noise of a label), "mutual_information" (the
                entropy less that average: what the label would say about the weights, known as BALD),
                "relative_variance" (the variance of the largest logit in units of its mean square, between 0 and 1) or
                "energy" (minus the logsumexp of the logits, without error bars). See `linnet.probability.uncertainty`.
                A list of names gives a dict of several scores from one pass.
            draws: Draws of the logits that entropies and probabilities average over. All inputs share the draws.

        Example:
            >>> from torch import nn
            >>> from linnet import TangentClassifier
            >>> X, y = torch.randn(60, 2), torch.arange(60) % 3
            >>> X[torch.arange(60), y.clamp(max=1)] += 3 * (y < 2)
            >>> la = TangentClassifier(nn.Linear(2, 3), inference="laplace").fit(X, y)
            >>> between, inside = la.uncertainty(torch.tensor([[2.0, 2.0], [6.0, 0.0]]), "entropy")
            >>> bool(between > inside)
            True
        """
        return convert_scores(X, score, self._score_beliefs(X, score, draws))

    def _score_beliefs(self, X: Any, score: UncertaintyScore | Sequence[UncertaintyScore], draws: int) -> ClassBeliefs:
        """The beliefs about the classes at X; raise where the likelihood has no such score."""
        check_is_fitted(self)
        likelihood = self._class_likelihood()
        for name in [score] if isinstance(score, str) else score:
            check_score(name, likelihood, point=self.posterior_.is_point)
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
            raise ValueError(f"draws must be a positive number; got {draws!r}.")
        spread: Spread = "factor" if self.variance_ == "samples" else "blocks"
        f, cov = self._outputs_and_spread(X, "none" if self.posterior_.is_point else spread)
        width = f.shape[1] if cov is None or spread == "blocks" else cov.T.shape[-1]
        generator = torch.Generator().manual_seed(self.seed)
        return describe_classes(likelihood, f, cov, make_rule(likelihood, width, f, draws, generator))

    def _outputs_and_spread(self, X: Any, spread: Spread) -> tuple[Any, Any]:
        """Means of the outputs (n, c), and their second moments."""
        raise NotImplementedError

    def _class_likelihood(self) -> Likelihood:
        """The likelihood; raise where its targets are no classes."""
        found: Likelihood = self.likelihood_
        if isinstance(found, Sites):
            raise NotImplementedError(
                "uncertainty is for one label of each example; this fit has a label for each site. predict_proba gives "
                "the probabilities of each site."
            )
        if not isinstance(found, Bernoulli | Categorical | Ordinal) and not describe_likelihood(found)["own"]:
            raise ValueError(
                f"uncertainty is for classes; the likelihood is {found!r}. Use predict(X, return_std=True)."
            )
        return found
