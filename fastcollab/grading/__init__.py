"""Grading of answers: extract one from a response, map it to a key, compare keys. Equality is an equivalence relation.

``equal(a, b)`` is ``key(a) == key(b)``, so votes cluster by key and a reward is a look-up (corl spec 8.2, 8.3). No
tolerance, and a percent, degree or currency sign is dropped everywhere: 37.5 % equals 37.5 and not 3/8. All is pure
Python, bounded in size and so in time; it needs no worker process, thread or signal.
"""

from fastcollab.grading.answer import equal, key
from fastcollab.grading.extract import extract

__all__ = ["equal", "extract", "key"]
