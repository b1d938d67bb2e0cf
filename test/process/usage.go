package process

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// CPU returns the processor time of a process; 0 without /proc.
func CPU(pid int) time.Duration {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The fields after the process name, which may contain any character.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * (time.Second / 100) // A tick is 10 ms on Linux.
}

// Memory returns the current and the peak resident memory of a process, in bytes; 0 without
// /proc.
func Memory(pid int) (now, peak int64) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		_, _ = fmt.Sscanf(line, "VmRSS: %d kB", &now)
		_, _ = fmt.Sscanf(line, "VmHWM: %d kB", &peak)
	}
	return now << 10, peak << 10
}
