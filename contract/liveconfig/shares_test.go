package liveconfig

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var refCRM = Ref{SectionDestinations, "crm"}

func TestShares(t *testing.T) {
	want := Shares{Version: SharesVersion, Number: 7, Pods: []string{"d-0", "d-1", "d-2"}, Default: []Share{Whole / 3, Whole / 3, 0},
		Objects: map[string][]Share{ShareKey("shop", refCRM): {Whole / 2, Whole / 4, 0}}}
	data, err := EncodeShares(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeShares(data)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Fatalf("decoded (-want +got), error %v:\n%s", err, diff)
	}
	for _, c := range []struct {
		pod           string
		object        Ref
		want          Share
		listed, waits bool
	}{
		{"d-0", refCRM, Whole / 2, true, false},
		{"d-1", refCRM, Whole / 4, true, false},
		{"d-1", Ref{SectionSources, "crm"}, Whole / 3, true, false},
		{"d-2", refCRM, 0, true, true},
		{"d-3", refCRM, 0, false, true},
	} {
		p := got.Of(c.pod)
		if share := p.For("shop", c.object); share != c.want || p.Listed != c.listed || p.Waits() != c.waits {
			t.Errorf("%s of %s: got share %d, listed %t, waits %t, want %+v", c.object, c.pod, share, p.Listed, p.Waits(), c)
		}
	}
	if share := got.Of("d-3").Alone().For("shop", refCRM); share != Whole/4 {
		t.Errorf("share of a fourth dispatcher alone: got %d, want %d", share, Whole/4)
	}
	if share := got.Of("d-2").Alone().For("shop", refCRM); share != Whole/3 {
		t.Errorf("share of a listed dispatcher alone: got %d, want %d", share, Whole/3)
	}
	var whole *PodShares
	if share := whole.For("shop", refCRM); share != Whole || whole.Waits() || whole.Equal() != Whole {
		t.Errorf("share without shares: got %d, want %d", share, Whole)
	}
}

// Equal shares of a number are its quotient, for all numbers of requests in flight and dispatchers.
func TestEqualShares(t *testing.T) {
	for pods := 1; pods <= 100; pods++ {
		for total := 1; total <= MaxInFlight; total++ {
			if got, want := (Whole / Share(pods)).Count(total), total/pods; got != want {
				t.Fatalf("share of %d of one of %d: got %d, want %d", total, pods, got, want)
			}
		}
	}
}

// A document is small, also with the most unequal shares.
func TestSizeOfShares(t *testing.T) {
	s := Shares{Number: 1_800_000_000, Objects: map[string][]Share{}}
	for i := range 3 {
		s.Pods, s.Default = append(s.Pods, fmt.Sprintf("posthorn-dispatcher-%d", i)), append(s.Default, Whole/3)
	}
	for objects, most := range map[int]int{0: 200, 1000: 40_000} {
		for i := range objects {
			s.Objects[fmt.Sprintf("team-%d/destinations/receiver-%d", i/20, i)] = []Share{Share(700_000_000 + i*7919),
				Share(200_000_000 + i*104_729), Share(i * 1_299_709 % 90_000_000)}
		}
		data, err := EncodeShares(s)
		if size := len(data[SharesKey]); err != nil || size > most {
			t.Errorf("bytes with %d objects: got %d, error %v, want at most %d", objects, size, err, most)
		} else {
			t.Logf("%d objects: %d bytes", objects, size)
		}
		clear(s.Objects)
	}
}

func TestInvalidShares(t *testing.T) {
	for name, s := range map[string]Shares{
		"not sorted":            {Pods: []string{"b", "a"}, Default: []Share{1, 1}},
		"too few shares":        {Pods: []string{"a", "b"}, Default: []Share{1}},
		"too many of an object": {Pods: []string{"a"}, Default: []Share{1}, Objects: map[string][]Share{"x": {1, 2}}},
	} {
		data, err := EncodeShares(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeShares(data); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := DecodeShares(nil); err == nil {
		t.Error("no data: no error")
	}
}
