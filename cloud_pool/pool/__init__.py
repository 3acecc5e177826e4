"""One tier's Triton endpoints: who of them gets the next request, and who gets none for now.

Assign, then act: `choice.choose` is a pure function over a frozen `state.PoolState`; `pool.Pool` owns that state.
"""

from .place import Place as Place
from .place import place_of as place_of
from .pool import EndpointView as EndpointView
from .pool import Lease as Lease
from .pool import Pool as Pool
