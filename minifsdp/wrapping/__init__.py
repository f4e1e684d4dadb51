"""From a module to units, once, before the first step.

policies.py and auto_wrap.py choose which modules become units, materialize.py gives their
parameters memory and values, build.py puts a unit together. Whoever wants to know how a step works
need not read any of it.
"""
