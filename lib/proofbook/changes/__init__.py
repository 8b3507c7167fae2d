"""Changes: observations in, a plan out; and how an approved plan is acted on."""
