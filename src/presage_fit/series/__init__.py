"""Step times one after the other: a model of a run's series, fitted to logs of sister runs.

A step of run r takes  level x (1 + run + drift(k) + slope x k + bulk) + stalls,  and more where the schedule says so:
- `run`: the run's own pace, the same in all its steps; `slope`: its own drift, beside
- `drift(k)`, which sister runs share almost wholly, so that it is known step by step (of few records: fitted with the
  levels at once);
- `bulk`: a latent Gaussian series (one part goes with the step before, one part is new), stretched to the skewed shape
  that residuals have, wider where sister runs are (they settle in the first steps);
- stalls: a rate that differs between runs and along them, heavy-tailed seconds; those that come back at the same step
  in sister runs are expected there;
- the schedule: first steps, first step after the first evaluation, after later ones.
Numbers that two or three runs cannot tell (how far apart runs are) lean on a prior learned from other groups of runs.
"""

from presage_fit.series.model import Predicted, SeriesFit, fit
from presage_fit.series.prior import SeriesPrior, learn

__all__ = ["Predicted", "SeriesFit", "SeriesPrior", "fit", "learn"]
