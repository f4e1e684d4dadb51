"""What the concepts stand on: autograd, and a module's parameters while they are sharded or not.

Nothing here knows of a training step. Each file knows one thing that the concept files at the top
would otherwise have to explain.
"""
