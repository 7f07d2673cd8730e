"""`smdistributed.modelparallel.torch` is `smp`, and so is everything below it: the modules themselves, not copies."""

import sys

from smdistributed._alias import AliasFinder

# The version whose interface this is; clients parse it and switch on >= 1.10.
__version__ = "1.15.0"

sys.meta_path.insert(
    0,
    AliasFinder(
        {
            "smdistributed.modelparallel.torch": "smp",
            "smdistributed.modelparallel.backend.exceptions": "smp.exceptions",
        }
    ),
)
