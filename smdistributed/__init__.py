"""The second name of `smp`: `import smdistributed.modelparallel.torch as smp` gives the same module objects."""
