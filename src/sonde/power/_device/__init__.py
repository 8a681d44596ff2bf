"""Device code that every kernel of the family may use.

Three words say where numbers are: a *slab* is a whole matrix in memory, a *tile* the part of it that a program works on, a
*fragment* the part of a tile that a program holds in registers. ``docs/power.md`` shows how a kernel is put together from them.
"""
