package main

import (
	"errors"
	"strings"
	"testing"
)

func TestMemoryBound(t *testing.T) {
	limited := func(bytes uint64) func() (uint64, error) {
		return func() (uint64, error) { return bytes, nil }
	}
	unlimited := func() (uint64, error) { return 0, errors.New("no limit") }
	for _, c := range []struct {
		flag      string
		container func() (uint64, error)
		want      int64
		err       string
	}{
		{flag: "400M", container: unlimited, want: 400_000_000},
		{flag: "1Gi", container: limited(4 << 30), want: 1 << 30},
		{flag: "400M", container: limited(300_000_000), want: 270_000_000},
		{flag: "200M", container: unlimited, want: 200_000_000},
		{flag: "199M", container: unlimited, err: "--memory 199M: too small; use 200M or more"},
		{flag: "-1", container: unlimited, err: "use 200M or more"},
		{flag: "much", container: unlimited, err: `--memory "much": use a size such as 400M or 1Gi`},
		{flag: "400M", container: limited(128 << 20), err: "the container's memory limit of 134217728 bytes is too small; set it to 212Mi or more"},
		{flag: "400M", container: limited(212 << 20), want: 212 << 20 / 10 * 9},
	} {
		got, err := memoryBound(c.flag, c.container)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("--memory %s: got %d, %v; want %d, %q", c.flag, got, err, c.want, c.err)
		}
	}
}
