package memory

import (
	"fmt"
	"math"
	"syscall"
)

const (
	// otherFiles are the files that a dispatcher has open beside its connections to receivers: 1,000 tables of the store,
	// logs, listeners, and some connections of clients.
	otherFiles = 1100
	// minInFlight is the number of deliveries in flight that are planned with any limit of open files.
	minInFlight = 64
)

// OpenFiles returns the limit of open files of this process.
func OpenFiles() int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return math.MaxInt
	}
	return int(min(limit.Cur, math.MaxInt))
}

// FitFiles returns the plan with as many deliveries in flight as a limit of open files permits, because each has a
// connection. If these are fewer, the error names the limit.
func (p Plan) FitFiles(limit int) (Plan, error) {
	needed := p.InFlight + otherFiles
	if limit >= needed {
		return p, nil
	}
	p.InFlight = min(p.InFlight, max(limit-otherFiles, minInFlight))
	return p, fmt.Errorf("the limit of open files is %d, so at most %d deliveries can be in flight; set it (ulimit -n, LimitNOFILE) to %d or more",
		limit, p.InFlight, needed)
}
