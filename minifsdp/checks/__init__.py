"""Mistakes that would otherwise go unnoticed, found early and refused by name.

Ranks that disagree (rank_agreement.py and what it uses), optimizers that cannot work on chunks,
modules that are replaced after wrapping, other wrappers, features that are not there. The concepts
at the top work without reading any of it.
"""
