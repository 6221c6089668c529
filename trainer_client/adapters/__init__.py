"""Forms that trainers and models want, made of the canonical micro-batch: one module a convention.

Invariants: nothing here is imported by `trainer_client`; a module imports the one library whose
form it makes, so `import trainer_client.adapters` needs the base install only.
"""
