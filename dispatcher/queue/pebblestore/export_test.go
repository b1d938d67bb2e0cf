package pebblestore

// For tests outside of the package.
var (
	TrimNow        = trimNow
	LaneHasPending = laneHasPending
	Trials         = trials
	Env            = env
)
