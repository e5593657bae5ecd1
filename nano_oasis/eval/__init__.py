"""What the oasis mode costs: accuracy, hit rate and recall, on tasks or on anyone's text.

from nano_oasis.eval import run
result = run("smollm2", tasks="ruler", context=4000, budget=["256", "1/8"], output="out")
"""

from nano_oasis.eval.api import run
from nano_oasis.eval.results import Result

__all__ = ["Result", "run"]
