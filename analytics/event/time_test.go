package event

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestReadTime(t *testing.T) {
	const missing = ""
	tests := []struct{ in, want string }{
		{`"2009-11-10T23:00:00.000Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00:00Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00:00+0000"`, "2009-11-10T23:00:00.000Z"}, // the vendor's Go client, version 2
		{`"2009-11-10T23:00:00-0700"`, "2009-11-11T06:00:00.000Z"},
		{`"2009-11-10T23:00:00.5+05:30"`, "2009-11-10T17:30:00.500Z"},
		{`"2009-11-10T23:00:00+02"`, "2009-11-10T21:00:00.000Z"},
		{`"2009-11-10T23:00:00.123456789Z"`, "2009-11-10T23:00:00.123Z"},
		{`"2009-11-10T23:00:00.999999+00:00"`, "2009-11-10T23:00:00.999Z"},
		{`"2009-11-10T23:00:00,25Z"`, "2009-11-10T23:00:00.250Z"},
		{`"2009-11-10T23:00:00"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10"`, "2009-11-10T00:00:00.000Z"},
		{`"2009-11-10 23:00:00"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10 23:00:00 +0100"`, "2009-11-10T22:00:00.000Z"},
		{`"2009-11-10 23:00:00 UTC"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10t23:00:00z"`, "2009-11-10T23:00:00.000Z"},
		{`"2016-12-31T23:59:60Z"`, "2017-01-01T00:00:00.000Z"},
		{`"2024-02-29T00:00:00Z"`, "2024-02-29T00:00:00.000Z"},
		{`"1969-12-31T23:59:59.999Z"`, "1969-12-31T23:59:59.999Z"},
		{`"0000-01-01T00:00:00Z"`, "0000-01-01T00:00:00.000Z"},
		{`"9999-12-31T23:59:59.999Z"`, "9999-12-31T23:59:59.999Z"},
		{`1257894000`, "2009-11-10T23:00:00.000Z"},
		{`1257894000.5`, "2009-11-10T23:00:00.500Z"},
		{`1257894000123`, "2009-11-10T23:00:00.123Z"},

		// Other forms of ISO 8601, and numbers in strings.
		{`"20091110T230000Z"`, "2009-11-10T23:00:00.000Z"}, {`"20091110T230000.25+0100"`, "2009-11-10T22:00:00.250Z"},
		{`"20091110"`, "2009-11-10T00:00:00.000Z"}, {`"20091110230000"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-314T23:00:00Z"`, "2009-11-10T23:00:00.000Z"}, {`"2009-W46-2T23:00:00Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009W462T230000Z"`, "2009-11-10T23:00:00.000Z"}, {`"2009-W53-7"`, "2010-01-03T00:00:00.000Z"},
		{`"2009-11-10T24:00:00Z"`, "2009-11-11T00:00:00.000Z"}, {`"+002009-11-10T23:00:00.000Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009/11/10 23:00:00"`, "2009-11-10T23:00:00.000Z"}, {`"2009-11-10T23"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10 23:00:00.123456789012 EST"`, "2009-11-11T04:00:00.123Z"}, {`" 2009-11-10T23:00:00 "`, "2009-11-10T23:00:00.000Z"},
		{`"1257894000"`, "2009-11-10T23:00:00.000Z"}, {`"1257894000.5"`, "2009-11-10T23:00:00.500Z"},
		{`"1257894000123"`, "2009-11-10T23:00:00.123Z"}, {`"1257894000123456"`, "2009-11-10T23:00:00.123Z"},
		{`"1257894000123456789"`, "2009-11-10T23:00:00.123Z"},
		{`1257894000123456`, "2009-11-10T23:00:00.123Z"}, {`1257894000123456789`, "2009-11-10T23:00:00.123Z"},
		// The texts of Go, Java, JavaScript, Ruby, Python, C and mail.
		{`"2009-11-10 23:00:00 +0000 UTC"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10 23:00:00.123456 +0100 CET m=+0.000012"`, "2009-11-10T22:00:00.123Z"},
		{`"2009-11-10 23:00:00 +0530 +0530 m=-1.5"`, "2009-11-10T17:30:00.000Z"}, {`"2009-11-10 20:00:00 -0300 -03"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00+01:00[Europe/Paris]"`, "2009-11-10T22:00:00.000Z"}, {`"Tue Nov 10 23:00:00 GMT 2009"`, "2009-11-10T23:00:00.000Z"},
		{`"Tue Nov 10 23:00:00 CET 2009"`, "2009-11-10T22:00:00.000Z"}, {`"Tue Nov 10 23:00:00 GMT+01:00 2009"`, "2009-11-10T22:00:00.000Z"},
		{`"Tue Nov 10 2009 23:00:00 GMT+0000 (Coordinated Universal Time)"`, "2009-11-10T23:00:00.000Z"}, {`"Tue Nov 10 2009 23:00:00 GMT-0800 (PST)"`, "2009-11-11T07:00:00.000Z"}, {`"Tue Nov 10 2009"`, "2009-11-10T00:00:00.000Z"}, {`"Mon May 01 2023"`, "2023-05-01T00:00:00.000Z"}, {`"Tue Nov 10 23:00:00 UTC+0100 2009"`, "2009-11-10T22:00:00.000Z"},
		{`"Tue Nov 10 23:00:00 +0000 2009"`, "2009-11-10T23:00:00.000Z"}, {`"Tue Nov  3 23:00:00 2009"`, "2009-11-03T23:00:00.000Z"},
		{`"Tue Nov 10 23:00:00 2009"`, "2009-11-10T23:00:00.000Z"},
		{`"Tue, 10 Nov 2009 23:00:00 GMT"`, "2009-11-10T23:00:00.000Z"}, {`"Tue, 10 Nov 2009 23:00:00 -0700"`, "2009-11-11T06:00:00.000Z"},
		{`"10 Nov 09 23:00 UTC"`, "2009-11-10T23:00:00.000Z"}, {`"10 Nov 09 23:00 +0100"`, "2009-11-10T22:00:00.000Z"},
		{`"Tuesday, 10-Nov-09 23:00:00 UTC"`, "2009-11-10T23:00:00.000Z"}, {`"Sat, 10-Oct-2009 23:00:00 GMT"`, "2009-10-10T23:00:00.000Z"},
		{`"November 10, 2009 23:00:00 UTC"`, "2009-11-10T23:00:00.000Z"},

		{``, missing}, {`null`, missing}, {`""`, missing}, {`"now"`, missing}, {`true`, missing}, {`{}`, missing}, {`["2009-11-10"]`, missing},
		{`0`, missing}, {`-1`, missing}, {`1e300`, missing}, {`"0"`, missing},
		{`"0001-01-01T00:00:00Z"`, missing}, // an unset time
		{`"2009-13-10T23:00:00Z"`, missing}, {`"2009-00-10T23:00:00Z"`, missing}, {`"2009-11-31T23:00:00Z"`, missing},
		{`"2009-02-29T23:00:00Z"`, missing}, {`"2009-11-00T23:00:00Z"`, missing},
		{`"2009-11-10T24:00:01Z"`, missing}, {`"2009-11-10T25:00:00Z"`, missing}, {`"2009-11-10T23:60:00Z"`, missing},
		{`"2009-11-10T23:00:61Z"`, missing},
		{`"2009-11-10T23:00:00.Z"`, missing}, {`"2009-11-10T23:00:00+1"`, missing}, {`"2009-11-10T23:00:00+24:00"`, missing},
		{`"2009-11-10T23:00:00+00:60"`, missing}, {`"2009-11-10T23:00:00+00:0"`, missing}, {`"2009-11-10T23:00:00ZZ"`, missing},
		{`"2009-11-10T"`, missing}, {`"2009-11-10x23:00:00"`, missing}, {`"09-11-10"`, missing}, {`"2009-1-1"`, missing}, {`"2009"`, missing},
		{`"+02009-11-10T23:00:00Z"`, missing}, {`"20091301"`, missing}, {`"2009-366"`, missing}, {`"2009-W54-1"`, missing},
		{`"2009-W46-8"`, missing},
		{`"11/10/2009"`, missing}, {`"10.11.2009"`, missing}, {`"Nov 10, 2009 11:00:00 PM"`, missing}, {`"2009-11-10 23:00:00 IST"`, missing},
		{`"Tue Feb 30 2023"`, missing},
		{`"Tue Nov 10 23:00:00"`, missing}, {`"23:00:00"`, missing}, {`"Tue Nov 10 23:00:00 2009 2010"`, missing},
		{`"2009-11-10 23:00:00 +0000 +0100"`, missing}, {`"2009-11-10 23:00:00 (UTC"`, missing},
		{`"0001-01-01 00:00:00 +0000 UTC"`, missing}, {`"` + strings.Repeat("1 ", 60) + `"`, missing},
		{`"0000-01-01T00:00:00+01:00"`, missing}, {`"9999-12-31T23:59:59-01:00"`, missing},
		{`"２００９-11-10"`, missing},
	}
	for _, tt := range tests {
		got := missing
		if i := readTime([]byte(tt.in)); i.ok {
			got = string(appendMillis(nil, i.ms))
		}
		if got != tt.want {
			t.Errorf("readTime(%s): got %q, want %q", tt.in, got, tt.want)
		}
	}
}

// TestReadTimeAsTheLibrary compares the result with the standard library's parser.
func TestReadTimeAsTheLibrary(t *testing.T) {
	for at := time.Date(1, 1, 1, 1, 2, 3, 4_000_000, time.UTC); at.Year() < 9999; at = at.Add(3456789*time.Second + 7654321*time.Nanosecond) {
		local := at.In(time.FixedZone("", at.Second()*1800-15*3600))
		for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05.000-0700", "2006-01-02 15:04:05.999999Z07:00"} {
			text := local.Format(layout)
			want, err := time.Parse(layout, text)
			if err != nil {
				t.Fatal(err)
			}
			got := parseTime([]byte(text))
			if !got.ok || got.ms != want.UnixMilli() {
				t.Fatalf("parseTime(%s): got %v, want %d", text, got, want.UnixMilli())
			}
			out := string(appendMillis(nil, got.ms))
			if back, err := time.Parse(time.RFC3339, out); err != nil || back.UnixMilli() != got.ms {
				t.Fatalf("appendMillis of %s: got %s, want the same time", text, out)
			}
		}
	}
}

func TestTimestamps(t *testing.T) {
	tests := []struct {
		name                                 string
		timestamp, original, sentAt, batchAt string // JSON values; an empty one is not sent
		want, wantOriginal                   string // for a receipt at 2026-05-04T12:00:00.123Z
	}{
		{"nothing", "", "", "", "", "2026-05-04T12:00:00.123Z", ""},
		{"only sentAt", "", "", `"2026-05-04T11:00:00Z"`, "", "2026-05-04T12:00:00.123Z", ""},
		{"only timestamp", `"2015-01-02T03:04:05.678Z"`, "", "", "", "2015-01-02T03:04:05.678Z", `"2015-01-02T03:04:05.678Z"`},
		{"a correct clock", `"2026-05-04T11:59:00.000Z"`, "", `"2026-05-04T12:00:00.000Z"`, "", "2026-05-04T11:59:00.000Z",
			`"2026-05-04T11:59:00.000Z"`},
		{"a clock an hour late", `"2026-05-04T10:59:58.001Z"`, "", `"2026-05-04T11:00:00.000Z"`, "", "2026-05-04T11:59:58.124Z",
			`"2026-05-04T10:59:58.001Z"`},
		{"a clock a year early", `"2027-05-04T12:00:00Z"`, "", `"2027-05-04T12:00:05Z"`, "", "2027-05-04T12:00:00.000Z",
			`"2027-05-04T12:00:00Z"`},
		{"an unset clock", `"1970-01-01T00:00:10Z"`, "", `"1970-01-01T00:00:20Z"`, "", "2026-05-04T11:59:50.123Z", `"1970-01-01T00:00:10Z"`},
		{"the clock was set in between", `"1970-01-01T00:00:10Z"`, "", `"2026-05-04T12:00:00Z"`, "", "1970-01-01T00:00:10.000Z",
			`"1970-01-01T00:00:10Z"`},
		{"historical data", `"1999-12-31T23:59:59Z"`, "", `"2026-05-04T12:00:00Z"`, "", "1999-12-31T23:59:59.000Z", `"1999-12-31T23:59:59Z"`},
		{"finer than milliseconds", `"2026-05-04T11:59:00.0009Z"`, "", `"2026-05-04T12:00:00.0011Z"`, "", "2026-05-04T11:59:00.000Z",
			`"2026-05-04T11:59:00.0009Z"`},
		{"offsets", `"2026-05-04T04:59:00-0700"`, "", `"2026-05-04T14:00:00+02:00"`, "", "2026-05-04T11:59:00.000Z",
			`"2026-05-04T04:59:00-0700"`},
		{"seconds since 1970", `1777895940`, "", `1777896000000`, "", "2026-05-04T11:59:00.000Z", `1777895940`},
		{"slightly in the future", `"2026-05-04T13:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T13:00:00.000Z",
			`"2026-05-04T13:00:00Z"`},
		{"a day in the future", `"2026-05-05T12:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-05T12:00:00.000Z", `"2026-05-05T12:00:00Z"`},
		{"far in the future", `"2030-01-01T00:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2030-01-01T00:00:00.000Z", `"2030-01-01T00:00:00Z"`},
		{"sent by an unset clock", `"2026-05-04T11:00:00Z"`, "", `"1970-01-01T00:00:00Z"`, "", "2026-05-04T11:00:00.000Z",
			`"2026-05-04T11:00:00Z"`},
		{"sentAt is unset", `"2026-05-04T11:00:00Z"`, "", `"0001-01-01T00:00:00Z"`, "", "2026-05-04T11:00:00.000Z", `"2026-05-04T11:00:00Z"`},
		{"sentAt is unreadable", `"2026-05-04T11:00:00Z"`, "", `"yesterday"`, "", "2026-05-04T11:00:00.000Z", `"2026-05-04T11:00:00Z"`},
		{"timestamp is unreadable", `"yesterday"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T12:00:00.123Z", `"yesterday"`},
		{"timestamp is an object", `{"a":1}`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T12:00:00.123Z", `{"a":1}`},
		{"timestamp is unset", `"0001-01-01T00:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T12:00:00.123Z", `"0001-01-01T00:00:00Z"`},
		{"timestamp is null", `null`, "", "", "", "2026-05-04T12:00:00.123Z", ""},
		{"timestamp is empty", `""`, "", "", "", "2026-05-04T12:00:00.123Z", ""},
		{"originalTimestamp for timestamp", "", `"2026-05-04T11:59:00Z"`, `"2026-05-04T12:00:00Z"`, "", "2026-05-04T11:59:00.000Z",
			`"2026-05-04T11:59:00Z"`},
		{"originalTimestamp for null", `null`, `"2026-05-04T11:59:00Z"`, `"2026-05-04T12:00:00Z"`, "", "2026-05-04T11:59:00.000Z",
			`"2026-05-04T11:59:00Z"`},
		{"timestamp takes precedence", `"2026-05-04T11:58:00Z"`, `"2026-05-04T11:59:00Z"`, `"2026-05-04T12:00:00Z"`, "",
			"2026-05-04T11:58:00.000Z", `"2026-05-04T11:58:00Z"`},
		{"the first year", `"0000-01-01T00:00:00Z"`, "", `"2026-05-04T12:00:30Z"`, "", "0000-01-01T00:00:00.000Z", `"0000-01-01T00:00:00Z"`},
		{"the last year", `"9999-12-31T23:59:59.999Z"`, "", `"9999-12-31T23:59:59Z"`, "", "9999-12-31T23:59:59.999Z",
			`"9999-12-31T23:59:59.999Z"`},
		{"5 s of transit", `"2026-05-04T11:00:00Z"`, "", `"2026-05-04T11:59:55.124Z"`, "", "2026-05-04T11:00:00.000Z", `"2026-05-04T11:00:00Z"`},
		{"more than transit", `"2026-05-04T11:00:00Z"`, "", `"2026-05-04T11:59:55.123Z"`, "", "2026-05-04T11:00:05.000Z",
			`"2026-05-04T11:00:00Z"`},
		{"a clock 4.9 s ahead", `"2026-05-04T12:00:00Z"`, "", `"2026-05-04T12:00:05.122Z"`, "", "2026-05-04T12:00:00.000Z",
			`"2026-05-04T12:00:00Z"`},
		{"a clock 5 s ahead", `"2026-05-04T12:00:00Z"`, "", `"2026-05-04T12:00:05.123Z"`, "", "2026-05-04T11:59:55.000Z",
			`"2026-05-04T12:00:00Z"`},
		{"offline for 24 h", `"2026-05-03T11:00:00Z"`, "", `"2026-05-03T12:00:00.123Z"`, "", "2026-05-04T11:00:00.000Z",
			`"2026-05-03T11:00:00Z"`},
		{"offline for longer", `"2026-05-03T11:00:00Z"`, "", `"2026-05-03T12:00:00.122Z"`, "", "2026-05-03T11:00:00.000Z",
			`"2026-05-03T11:00:00Z"`},
		{"a clock 25 h ahead", `"2026-05-05T13:00:00Z"`, "", `"2026-05-05T13:00:00.124Z"`, "", "2026-05-05T13:00:00.000Z",
			`"2026-05-05T13:00:00Z"`},
		{"an archive", `"2023-05-01T10:00:00Z"`, "", `"2023-05-01T10:00:01Z"`, "", "2023-05-01T10:00:00.000Z", `"2023-05-01T10:00:00Z"`},
		{"an archive's sentAt in milliseconds", `"2023-05-01T10:00:00Z"`, "", "", `1682935201000`, "2023-05-01T10:00:00.000Z",
			`"2023-05-01T10:00:00Z"`},
		{"a clock that was never set, until 2005", `"2004-12-31T23:59:58Z"`, "", `"2004-12-31T23:59:59.999Z"`, "", "2026-05-04T11:59:58.124Z",
			`"2004-12-31T23:59:58Z"`},
		{"a time from 2005 on", `"2004-12-31T23:59:59Z"`, "", `"2005-01-01T00:00:00Z"`, "", "2004-12-31T23:59:59.000Z", `"2004-12-31T23:59:59Z"`},
		{"two clocks before 2005", `"2001-01-01T00:00:00Z"`, "", `"1970-01-01T00:00:00Z"`, "", "2001-01-01T00:00:00.000Z",
			`"2001-01-01T00:00:00Z"`},
		{"originalTimestamp for an unreadable timestamp", `"yesterday"`, `"2026-05-04T11:59:00Z"`, "", "", "2026-05-04T11:59:00.000Z",
			`"2026-05-04T11:59:00Z"`},
		{"both unreadable", `"yesterday"`, `"today"`, "", "", "2026-05-04T12:00:00.123Z", `"yesterday"`},
		{"the batch's sentAt", `"2026-05-04T10:00:00Z"`, "", "", `"2026-05-04T11:00:00Z"`, "2026-05-04T11:00:00.123Z", `"2026-05-04T10:00:00Z"`},
		{"the call's sentAt takes precedence", `"2026-05-04T10:00:00Z"`, "", `"2026-05-04T10:00:01Z"`, `"2026-05-04T11:00:00Z"`,
			"2026-05-04T11:59:59.123Z", `"2026-05-04T10:00:00Z"`},
		{"an empty sentAt of the call does not take precedence", `"2026-05-04T10:00:00Z"`, "", `""`, `"2026-05-04T11:00:00Z"`,
			"2026-05-04T11:00:00.123Z", `"2026-05-04T10:00:00Z"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in := `{"batch":[{"type":"page","userId":"u"`
			for _, m := range [][2]string{{"timestamp", tt.timestamp}, {"originalTimestamp", tt.original}, {"sentAt", tt.sentAt}} {
				if m[1] != "" {
					in += "," + strconv.Quote(m[0]) + ":" + m[1]
				}
			}
			in += `}]`
			if tt.batchAt != "" {
				in += `,"sentAt":` + tt.batchAt
			}
			b, err := request("").Parse([]byte(in + `}`))
			if err != nil {
				t.Fatal(err)
			}
			c := b.Calls[0]
			m := members(t, c.Body)
			if string(m["timestamp"]) != strconv.Quote(tt.want) || c.Timestamp.Format("2006-01-02T15:04:05.000Z07:00") != tt.want ||
				string(m["originalTimestamp"]) != tt.wantOriginal {
				t.Errorf("times: got timestamp %s (%v) and originalTimestamp %s, want %s and %s", m["timestamp"], c.Timestamp, m["originalTimestamp"], tt.want, tt.wantOriginal)
			}
		})
	}
}

// Past calls, and messages of Posthorn that are sent again, keep their time.
func TestPastCallsAreNotCorrected(t *testing.T) {
	const times = `"timestamp":"2026-05-04T10:00:00Z","sentAt":"2026-05-04T11:00:00Z"`
	for _, tt := range []struct {
		name, times string
		past        bool
		want        string
	}{
		{"a call", times, false, "2026-05-04T11:00:00.123Z"},
		{"an import", times, true, "2026-05-04T10:00:00.000Z"},
		{"a delivered message", times + `,"originalTimestamp":"2026-05-04T09:00:00Z","receivedAt":"2026-05-04T11:00:01Z"`, false, "2026-05-04T10:00:00.000Z"},
		{"a delivered message without timestamp", `"sentAt":"2026-05-04T11:00:00Z","originalTimestamp":"2026-05-04T09:00:00Z","receivedAt":"x"`, false, "2026-05-04T09:00:00.000Z"},
		{"only receivedAt", times + `,"receivedAt":"2026-05-04T11:00:01Z"`, false, "2026-05-04T11:00:00.123Z"},
		{"only originalTimestamp", times + `,"originalTimestamp":"2026-05-04T09:00:00Z","receivedAt":null`, false, "2026-05-04T11:00:00.123Z"},
	} {
		r := request("")
		r.Import = tt.past
		b, err := r.Parse([]byte(`{"batch":[{"type":"page","userId":"u",` + tt.times + `}]}`))
		if err != nil {
			t.Fatal(err)
		}
		if got := string(appendMillis(nil, b.Calls[0].Timestamp.UnixMilli())); got != tt.want || b.Calls[0].Defects != 0 {
			t.Errorf("%s: got %s with defects %b, want %s", tt.name, got, b.Calls[0].Defects, tt.want)
		}
	}
}

func TestDefects(t *testing.T) {
	for call, want := range map[string]Defects{
		`"timestamp":"2026-05-04T10:00:00Z"`:                                 0,
		`"timestamp":null,"originalTimestamp":"","sentAt":null`:              0,
		`"timestamp":"0001-01-01T00:00:00Z","sentAt":0`:                      0,
		`"timestamp":"yesterday"`:                                            DefectTimestamp,
		`"timestamp":"2023-02-30T00:00:00Z","originalTimestamp":1257894000`:  DefectTimestamp,
		`"timestamp":{},"originalTimestamp":[]`:                              DefectTimestamp | DefectOriginalTimestamp,
		`"timestamp":"2026-05-04T10:00:00Z","originalTimestamp":"x"`:         0,
		`"timestamp":"2026-05-04T10:00:00Z","sentAt":"x"`:                    DefectSentAt,
		`"timestamp":"x","sentAt":"x"`:                                       DefectTimestamp,
		`"timestamp":"2023-05-01T10:00:00Z","sentAt":"2023-05-01T10:00:01Z"`: DefectClock,
		`"timestamp":"1970-01-01T00:00:10Z","sentAt":"1970-01-01T00:00:20Z"`: 0,
		`"properties":{"city":"Z` + "\xfc" + `rich"}`:                        DefectEncoding,
		`"` + "\xfc" + `":1,"timestamp":true`:                                DefectEncoding | DefectTimestamp,
		`"properties":{"city":"\ufffd\ud800"}`:                               0,
	} {
		body := `{"type":"page","userId":"u",` + call + `}`
		b,
			err := request("").Parse([]byte(`{"batch":[{"type":"page","userId":"v"},` + body + `,{"type":"page","userId":"v"}],"note":"` + "\xff" + `"}`))
		if err != nil {
			t.Fatal(err)
		}
		if got := b.Calls[1].Defects; got != want || b.Calls[0].Defects|b.Calls[2].Defects != 0 {
			t.Errorf("defects of %s: got %05b, and %05b and %05b of its neighbors, want %05b and none", call, got, b.Calls[0].Defects, b.Calls[2].Defects, want)
		}
	}
	b, err := request("").Parse([]byte(`{"batch":[{"type":"page","userId":"v","timestamp":1777895940}],"context":{"a":"` + "\xff" + `"},"sentAt":"x"}`))
	if err != nil || b.Calls[0].Defects != DefectEncoding|DefectSentAt {
		t.Errorf("defects of a batch's context and sentAt: got %05b and error %v, want encoding and sentAt", b.Calls[0].Defects, err)
	}
	at, unread := EventTime([]byte(`"Tue\u002c 10 Nov 2009 23:00:00 GMT"`), nil)
	if at.UnixMilli() != 1257894000000 || unread != 0 {
		t.Errorf("own time: got %v with %05b unread, want a time in 2009 and none", at, unread)
	}
	if at, unread = EventTime([]byte(`"x"`), nil); !at.IsZero() || unread != DefectTimestamp {
		t.Errorf("own time that is unreadable: got %v with %05b unread, want none and timestamp", at, unread)
	}
}
