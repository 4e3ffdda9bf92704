"""`--job.plan`: what a run would hold, send and compute, without running it."""
