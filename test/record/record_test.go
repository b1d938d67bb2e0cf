package record

import (
	"testing"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/witness"
)

// Journals that are written by the package have no flaw, and only their content is judged.
func TestWrittenJournals(t *testing.T) {
	t.Parallel()
	j := Begin(t)
	j.Sender.Write(witness.Line{Begin: j.Clock.Now(), Call: &witness.Call{Kind: witness.Calls, Process: "p", Valid: true, Status: 200,
		Messages: []witness.Message{{ID: "m1"}}}})
	for _, v := range j.Judge(t) {
		want := witness.Unclear
		if v.Clause.ID == "refusal" {
			want = witness.Holds
		}
		check.Equal(t, v.Clause.ID+" in a story of one call", v.Result, want)
		if v.Clause.ID != "refusal" {
			check.Equal(t, v.Clause.ID, v.Reason, "no line is about it")
		}
	}
}
