package slots

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// newTestCandidate returns a candidate that has read these records.
func newTestCandidate(t *testing.T, entries ...Entry) *candidate {
	t.Helper()
	c := newCandidate(&follower{copy: &countingReplica{}, next: 1}, State{Last: uint64(len(entries))}, start)
	for _, e := range entries {
		if err := c.apply(start, e); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

var (
	ownerClaims = entry(1, header{kindClaim, foreign, 1, 1, 1, 0, 0})
	ownerWrites = entry(2, header{kindBatches, foreign, 1, 2, 1, 1, 0})
)

// wantProposal takes the next step and compares the record that it publishes.
func wantProposal(t *testing.T, c *candidate, now time.Time, want kind, expected uint64) step {
	t.Helper()
	s := c.next(now)
	if s.action != actPublish {
		t.Fatalf("next step: got action %d until %v, want %d", s.action, s.until.Sub(start), actPublish)
	}
	h, _, err := decodeRecord(s.data)
	if err != nil {
		t.Fatal(err)
	}
	if h.kind != want || s.expected != expected || h.epoch != c.epoch+1 || h.last != c.last {
		t.Errorf("proposal: got %v of epoch %d behind batch %d and record %d, want %v of epoch %d behind batch %d and record %d",
			h.kind, h.epoch, h.last, s.expected, want, c.epoch+1, c.last, expected)
	}
	return s
}

// wantWait takes the next step, which must be to wait until a time after start.
func wantWait(t *testing.T, c *candidate, now time.Time, want time.Duration) {
	t.Helper()
	if s := c.next(now); s.action != actWait || s.until.Sub(start) != want {
		t.Errorf("next step: got action %d at %v, want %d at %v", s.action, s.until.Sub(start), actWait, want)
	}
}

// A silent owner is suspected after suspectAfter, and loses the slot claimAfter later.
func TestSuspectThenClaim(t *testing.T) {
	c := newTestCandidate(t, ownerClaims, ownerWrites)
	wantWait(t, c, start, suspectAfter)
	suspected := start.Add(suspectAfter)
	wantProposal(t, c, suspected, kindSuspect, 2)
	if err := c.answered(suspected, 3); err != nil {
		t.Fatal(err)
	}
	wantWait(t, c, suspected, suspectAfter+claimAfter)
	claimed := suspected.Add(claimAfter)
	wantProposal(t, c, claimed, kindClaim, 3)
	if err := c.answered(claimed, 4); err != nil {
		t.Fatal(err)
	}
	if s := c.next(claimed); s.action != actOwn {
		t.Errorf("next step after the claim: got action %d, want %d", s.action, actOwn)
	}
	if c.won.firstSent != claimed || c.won.last != 1 || c.won.epoch != 2 {
		t.Errorf("claim: got %+v sent at %v, want epoch 2 behind batch 1 sent at %v", c.won.header, c.won.firstSent, claimed)
	}
}

// A record of the owner delays the suspect, and ends the wait for a claim.
func TestLivingOwnerKeepsTheSlot(t *testing.T) {
	c := newTestCandidate(t, ownerClaims)
	if err := c.apply(start.Add(time.Second), ownerWrites); err != nil {
		t.Fatal(err)
	}
	wantWait(t, c, start.Add(time.Second), time.Second+suspectAfter)

	suspected := start.Add(time.Second + suspectAfter)
	wantProposal(t, c, suspected, kindSuspect, 2)
	if err := c.answered(suspected, 3); err != nil {
		t.Fatal(err)
	}
	if err := c.apply(suspected.Add(time.Second), entry(4, header{kindHeartbeat, foreign, 1, 3, 2, 1, 0})); err != nil {
		t.Fatal(err)
	}
	wantWait(t, c, suspected.Add(time.Second), time.Second+suspectAfter+time.Second+suspectAfter)
}

// The suspect of another pod is used in place of an own one.
func TestOneSuspectIsEnough(t *testing.T) {
	other := pebblestore.Session{3}
	c := newTestCandidate(t, ownerClaims, entry(2, header{kindSuspect, other, 2, 1, 1, 0, 0}))
	wantWait(t, c, start.Add(suspectAfter), claimAfter)
	wantProposal(t, c, start.Add(claimAfter), kindClaim, 2)
}

func TestClaimsImmediately(t *testing.T) {
	released := entry(3, header{kindReleased, foreign, 1, 3, 2, 1, 0})
	t.Run("empty stream", func(t *testing.T) {
		wantProposal(t, newTestCandidate(t), start, kindClaim, 0)
	})
	t.Run("released", func(t *testing.T) {
		wantProposal(t, newTestCandidate(t, ownerClaims, ownerWrites, released), start, kindClaim, 3)
	})
	t.Run("exited session", func(t *testing.T) {
		c := newTestCandidate(t, ownerClaims, ownerWrites)
		c.exited = foreign
		wantProposal(t, c, start, kindClaim, 2)
	})
	t.Run("not while the copy is behind", func(t *testing.T) {
		c := newTestCandidate(t, ownerClaims, ownerWrites, released)
		c.end = 4
		wantWait(t, c, start, (time.Time{}).Sub(start))
	})
}

// A proposal whose answer is lost is repeated with the same id until a record follows.
func TestProposalIsRepeated(t *testing.T) {
	now := start.Add(suspectAfter)
	c := newTestCandidate(t, ownerClaims, ownerWrites)
	first := wantProposal(t, c, now, kindSuspect, 2)
	c.refused(now, errors.New("timeout"))
	wantWait(t, c, now, suspectAfter+repeatAfter)
	now = now.Add(repeatAfter)
	if again := wantProposal(t, c, now, kindSuspect, 2); again.id != first.id {
		t.Errorf("repeated suspect: got id %s, want %s", again.id, first.id)
	}
	c.refused(now, ErrWrongSequence)
	wantWait(t, c, now, suspectAfter+repeatAfter+behindPause)
	if err := c.apply(now, entry(3, header{kindHeartbeat, foreign, 1, 3, 2, 1, 0})); err != nil {
		t.Fatal(err)
	}
	wantWait(t, c, now, suspectAfter+repeatAfter+suspectAfter)
	now = now.Add(suspectAfter)
	if next := wantProposal(t, c, now, kindSuspect, 3); next.id == first.id {
		t.Errorf("suspect behind another record: got the id %s again, want another one", next.id)
	}
}

// A claim whose answer was lost is found by reading it; the claim of another pod ends the proposal.
func TestClaimIsRead(t *testing.T) {
	c := newTestCandidate(t)
	s := wantProposal(t, c, start, kindClaim, 0)
	if err := c.apply(start, Entry{1, s.data}); err != nil {
		t.Fatal(err)
	}
	if c.won == nil {
		t.Error("own claim in the stream: got no slot, want it")
	}
	c = newTestCandidate(t)
	wantProposal(t, c, start, kindClaim, 0)
	if err := c.apply(start, ownerClaims); err != nil {
		t.Fatal(err)
	}
	if c.won != nil {
		t.Error("claim of another pod in the stream: got the slot, want none")
	}
	wantWait(t, c, start, suspectAfter)
}

// The values of a copy are passed on when it has the records that the stream had at the start, and then at intervals.
func TestValuesOfTheCopy(t *testing.T) {
	c := newTestCandidate(t, ownerClaims, ownerWrites)
	c.end = 3
	now := start
	var got []time.Duration
	o := Options{Now: func() time.Time { return now }, Values: func(values map[string][]byte) {
		if string(values["batch"]) != "1" {
			t.Errorf("values: got %q, want those of batch 1", values)
		}
		got = append(got, now.Sub(start))
	}}
	for range 3 * valuesInterval / time.Second {
		if err := c.passValues(o); err != nil {
			t.Fatal(err)
		}
		now = now.Add(time.Second)
		if now.Sub(start) == 2*time.Second {
			if err := c.apply(now, entry(3, header{kindHeartbeat, foreign, 1, 3, 2, 1, 0})); err != nil {
				t.Fatal(err)
			}
		}
	}
	if want := []time.Duration{2 * time.Second, 2*time.Second + valuesInterval, 2*time.Second + 2*valuesInterval}; !slices.Equal(got, want) {
		t.Errorf("times of the values: got %v, want %v", got, want)
	}
}
