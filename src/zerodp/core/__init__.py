"""The engine. Read in this order: layout, stages, comm, arena, parameter, unit, schedule, cache, reducer, runtime, optimizer."""
