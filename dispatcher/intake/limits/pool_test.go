package limits

import (
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

// A namespace may use as much as remains free, so n busy ones get 1/(n+1) each.
func TestPoolIsShared(t *testing.T) {
	for namespaces, want := range map[int]int64{1: 500, 2: 333, 3: 250} {
		p := &Pool{Max: 1000}
		for grown := true; grown; {
			grown = false
			for i := range namespaces {
				r := p.For(strconv.Itoa(i))
				grown = r.Grow(1) || grown
			}
		}
		for name, used := range p.accounts {
			if used < want-1 || used > want+1 {
				t.Errorf("%d namespaces: part of number %s: got %d, want %d", namespaces, name, used, want)
			}
		}
		if len(p.accounts) != namespaces {
			t.Errorf("accounts: got %d, want %d", len(p.accounts), namespaces)
		}
	}
}

func TestReservation(t *testing.T) {
	p := &Pool{Max: 100}
	used := func() [3]int64 { return [3]int64{p.Used(), p.accounts["from"], p.accounts["to"]} }
	r := p.For("from")
	for _, step := range []struct {
		name string
		do   func() bool
		fits bool
		used [3]int64 // in all, of from, of to
	}{
		{"grow", func() bool { return r.Grow(30) }, true, [3]int64{30, 30, 0}},
		{"grow above the half", func() bool { return r.Grow(21) }, false, [3]int64{30, 30, 0}},
		{"move with a reservation", func() bool { r.Move("to"); return r.Grow(1) }, true, [3]int64{31, 31, 0}},
		{"replace", func() bool { return r.Replace("to", 40) }, true, [3]int64{40, 0, 40}},
		{"replace by too much", func() bool { return r.Replace("from", 51) }, false, [3]int64{}},
		{"move without a reservation", func() bool { r.Move("to"); return r.Grow(5) }, true, [3]int64{5, 0, 5}},
		{"release", func() bool { r.Release(); return true }, true, [3]int64{}},
		{"release again", func() bool { r.Release(); return true }, true, [3]int64{}},
	} {
		if fits := step.do(); fits != step.fits {
			t.Errorf("%s: got fits %v, want %v", step.name, fits, step.fits)
		}
		if diff := cmp.Diff(step.used, used()); diff != "" {
			t.Errorf("%s: used bytes (-want +got):\n%s", step.name, diff)
		}
	}
}

// A body occupies memory for the bytes that have arrived, and not for the length that its request announces.
func TestReadBody(t *testing.T) {
	const most = 100 << 10
	broken := errors.New("broken")
	for _, c := range []struct {
		name         string
		body         io.Reader
		length       int64
		bytes, holds int64
		err          error
	}{
		{"empty", strings.NewReader(""), 0, 0, 0, nil},
		{"known length", strings.NewReader("abc"), 3, 3, 3, nil},
		{"unknown length", strings.NewReader("abc"), -1, 3, firstRead, nil},
		{"begin of a long one", io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(broken)), 90 << 10, 0, firstRead, broken},
		{"long", strings.NewReader(strings.Repeat("a", 90<<10)), 90 << 10, 90 << 10, 90 << 10, nil},
		{"too long", strings.NewReader(strings.Repeat("a", 2*most)), -1, most, most, nil},
		{"above the memory", strings.NewReader(strings.Repeat("a", 2*most)), 2 * most, 0, 64 << 10, ErrNoMemory},
	} {
		p := &Pool{Max: 2 * most}
		if c.err == ErrNoMemory { //nolint:errorlint // It is the value of this table.
			p.Max = 2*most - 1
		}
		r := p.For("a")
		body, err := ReadBody(c.body, &r, c.length, most)
		if !errors.Is(err, c.err) || int64(len(body)) != c.bytes || p.Used() != c.holds {
			t.Errorf("%s: got %d bytes, %d reserved and error %v, want %d, %d and %v", c.name, len(body), p.Used(), err, c.bytes, c.holds, c.err)
		}
	}
}
