package event

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// field is a member of a call that Parse reads or writes.
type field uint8

// The fields. From fieldType on, a missing field that has a value is appended to the message, in
// this order.
const (
	fieldOther field = iota // kept unchanged
	fieldWriteKey
	fieldUserID
	fieldAnonymousID
	fieldPreviousID
	fieldGroupID
	fieldEvent
	fieldTraits
	fieldProperties
	fieldType
	fieldMessageID
	fieldContext
	fieldIntegrations
	fieldOriginalTimestamp
	fieldSentAt
	fieldReceivedAt
	fieldTimestamp
	fieldSpelledPreviousID
	fieldSpelledUserID
	fieldVersion
	fieldCount
)

// isID reports whether the field identifies a message, a user or a group.
func (f field) isID() bool {
	return f == fieldMessageID || f == fieldUserID || f == fieldAnonymousID || f == fieldPreviousID || f == fieldGroupID
}

// fieldNames are the keys of the fields as canonical JSON.
var fieldNames = [fieldCount]string{
	fieldWriteKey:          `"writeKey"`,
	fieldUserID:            `"userId"`,
	fieldAnonymousID:       `"anonymousId"`,
	fieldPreviousID:        `"previousId"`,
	fieldGroupID:           `"groupId"`,
	fieldEvent:             `"event"`,
	fieldTraits:            `"traits"`,
	fieldProperties:        `"properties"`,
	fieldType:              `"type"`,
	fieldMessageID:         `"messageId"`,
	fieldContext:           `"context"`,
	fieldIntegrations:      `"integrations"`,
	fieldOriginalTimestamp: `"originalTimestamp"`,
	fieldSentAt:            `"sentAt"`,
	fieldReceivedAt:        `"receivedAt"`,
	fieldTimestamp:         `"timestamp"`,
	fieldSpelledPreviousID: `"Previous ID"`,
	fieldSpelledUserID:     `"User ID"`,
	fieldVersion:           `"version"`,
}

// fieldOf returns the field with a key, given as canonical JSON.
func fieldOf(key []byte) field {
	switch string(key) {
	case `"writeKey"`:
		return fieldWriteKey
	case `"userId"`:
		return fieldUserID
	case `"anonymousId"`:
		return fieldAnonymousID
	case `"previousId"`:
		return fieldPreviousID
	case `"groupId"`:
		return fieldGroupID
	case `"event"`:
		return fieldEvent
	case `"traits"`:
		return fieldTraits
	case `"properties"`:
		return fieldProperties
	case `"type"`:
		return fieldType
	case `"messageId"`:
		return fieldMessageID
	case `"context"`:
		return fieldContext
	case `"integrations"`:
		return fieldIntegrations
	case `"originalTimestamp"`:
		return fieldOriginalTimestamp
	case `"sentAt"`:
		return fieldSentAt
	case `"receivedAt"`:
		return fieldReceivedAt
	case `"timestamp"`:
		return fieldTimestamp
	case `"Previous ID"`:
		return fieldSpelledPreviousID
	case `"User ID"`:
		return fieldSpelledUserID
	case `"version"`:
		return fieldVersion
	}
	return fieldOther
}

// values has the canonical JSON values of a call's fields; nil means no value.
type values [fieldCount][]byte

// rawCall is a scanned call that is not validated.
type rawCall struct {
	from, to int  // its members are kept[from:to]
	size     int  // bytes of its text
	long     bool // true if the call has a long number
	replaced bool // true if the call has replaced parts of invalid UTF-8
	err      *Error
}

// placed has the positions of an accepted call's parts before they are final.
type placed struct {
	body, integrations                    span // in bodies
	messageID, event, userID, anonymousID span // in texts
	long                                  bool // true if the call or its batch has a long number; the body may have one
}

// Parse reads a body: one call when the request has a type, otherwise a batch.
//
// The error, always an *Error, applies to the whole body, or to its
// single call; the returned batch then has at most a WriteKey. A rejected call of a
// batch does not affect the others; it is in Rejected.
//
// The message of a call is the sent object, in its order, with these changes:
//
//   - writeKey is removed, version is 1, type is the path's.
//   - userId, anonymousId, previousId, groupId, event and messageId that are
//     numbers become strings. null and "" count as missing, and are kept. A call with an id that is not
//     UTF-8 is rejected: the ids of two users would become equal.
//   - messageId is assigned if it is missing.
//   - context and integrations of a batch are merged into the call's,
//     member by member, not deeper; the call's own members take precedence. An empty
//     array, which some languages write for an empty object, becomes {} in
//     context, integrations, traits and properties.
//   - Every message has a context; context.ip is the client's address if that is
//     known and the call has no ip.
//   - receivedAt is the time of receipt. sentAt is the call's own or the batch's,
//     as it was sent. originalTimestamp is the timestamp as it was sent, readable
//     or not; if that is missing or unreadable, a readable originalTimestamp
//     replaces it. timestamp, in ISO 8601 with milliseconds in UTC, is receivedAt
//     if no time was read, and otherwise the call's own time, corrected by the
//     error of the sender's clock, receivedAt - sentAt, if that is between 5 s and
//     24 h in either direction, or the clock was never set (both times are before
//     2005). It is not corrected for Import, and for a body with receivedAt and
//     originalTimestamp, which Posthorn delivered.
//   - alias also has "Previous ID" and "User ID".
func (r Request) Parse(body []byte) (Batch, error) {
	reading, err := r.Read(body)
	if err != nil {
		return Batch{WriteKey: reading.WriteKey}, err
	}
	defer reading.Release()
	return reading.Messages()
}

// Reading is a scanned body without messages, so that the sender can be identified and memory
// reserved before a batch grows.
type Reading struct {
	// WriteKey is the body's writeKey.
	WriteKey string
	// Calls is the number of calls of the body, and Bytes the approximate size of their messages,
	// at most MaxMergedBytes for a batch.
	Calls, Bytes int

	p parser
}

// Read scans a body. The caller may reuse the body when Read returns. The error, always an *Error,
// applies to the whole body; the returned Reading then has at most a WriteKey. Without an error the
// caller must call Release.
func (r Request) Read(body []byte) (Reading, error) {
	if r.Type != "" {
		if !r.Type.callable() {
			return Reading{}, &Error{CodeUnknownType, "the path has no type of call; use identify, track, page, screen, group, alias or batch"}
		}
		if len(body) > MaxBodyBytes {
			return Reading{}, callTooLarge
		}
	} else if len(body) > MaxBodyBytes {
		return Reading{}, &Error{CodeBodyTooLarge, fmt.Sprintf("the body is larger than the %d bytes allowed; split the batch", MaxBodyBytes)}
	}
	if r.ReceivedAt.IsZero() {
		r.ReceivedAt = time.Now()
	}
	if r.NewID == nil {
		r.NewID = randomUUID
	}
	s := newScanner(body)
	reading := Reading{p: parser{Request: r, s: s, received: r.ReceivedAt.UnixMilli(), most: MaxMergedBytes(len(body))}}
	s.receivedAt = appendQuotedTime(s.receivedAt[:0], reading.p.received)
	var err error
	if r.Type != "" {
		err = reading.readCall()
	} else {
		err = reading.readBatch()
	}
	if err != nil {
		s.release()
		return Reading{WriteKey: reading.WriteKey}, err
	}
	reading.Calls = len(s.calls)
	common := &reading.p.common
	each := MessageOverhead + len(common[fieldContext]) + len(common[fieldIntegrations]) + len(common[fieldSentAt])
	reading.Bytes = len(s.out) + each*len(s.calls)
	if reading.Bytes > reading.p.most {
		if reading.p.mergesTooMuch() {
			s.release()
			return Reading{WriteKey: reading.WriteKey}, batchTooLarge(len(s.calls), reading.p.most)
		}
		reading.Bytes = reading.p.most
	}
	s.in, s.pos, s.copied = nil, 0, 0
	return reading, nil
}

// mergesTooMuch reports whether the batch's context and integrations alone make the messages larger
// than the limit. It counts them for calls without their own; Messages finds the rest. So a batch
// that is certainly refused costs no messages.
func (p *parser) mergesTooMuch() bool {
	s, bytes := p.s, 0
	shared := [...]field{fieldContext, fieldIntegrations}
	for _, c := range s.calls {
		if c.err != nil || p.callTooLarge(c) {
			continue
		}
		v, _ := s.values(c)
		if t, err := v.callType(p.Type); err != nil || v.validate(t) != nil {
			continue
		}
		for _, f := range shared {
			if missing(v[f]) || string(v[f]) == "{}" {
				bytes += len(p.common[f])
			}
		}
		if bytes > p.most {
			return true
		}
	}
	return false
}

// Messages returns the messages of the calls, as Parse does. It must be called at
// most once.
func (r *Reading) Messages() (Batch, error) {
	p := &r.p
	p.result.WriteKey = r.WriteKey
	p.s.bodies = slices.Grow(p.s.bodies, r.Bytes)
	var err error
	if p.Type != "" {
		err = p.single()
	} else {
		err = p.batch()
	}
	if err != nil {
		return Batch{WriteKey: r.WriteKey}, err
	}
	p.finish()
	return p.result, nil
}

// Release ends the use of a Reading. The result of Messages remains valid.
func (r *Reading) Release() { r.p.s.release() }

var callTooLarge = &Error{CodeCallTooLarge, fmt.Sprintf("the call is larger than the %d bytes allowed, counting the context and integrations of its batch; send less data in one call", MaxCallBytes)}

func batchTooLarge(calls, most int) *Error {
	return &Error{CodeBatchTooLarge, fmt.Sprintf("the batch's context and integrations, merged into each of its %d calls, make messages of more than the %d bytes allowed (%d times the body, at least %d); send fewer calls in a batch, or less in its context", calls, most, MergedRatio, MinMergedBytes)}
}

// parser builds calls from the data of a scanner.
type parser struct {
	Request
	s          *scanner
	received   int64
	common     values // a batch's own context, integrations and sentAt
	commonSent instant
	replaced   bool // true if the batch's context or integrations have replaced parts of invalid UTF-8
	most       int  // bytes of all messages
	result     Batch
}

func (r *Reading) readCall() error {
	s := r.p.s
	if err := s.document((*scanner).call); err != nil {
		return err
	}
	s.flush()
	c := s.calls[0]
	for _, m := range s.kept[c.from:c.to] {
		if fieldOf(s.out[m.key.from:m.key.to]) == fieldWriteKey {
			r.WriteKey = decoded(s.out[m.value.from:m.value.to])
		}
	}
	return nil
}

func (r *Reading) readBatch() error {
	p, s := &r.p, r.p.s
	isArray := false
	err := s.document(func(s *scanner) bool {
		if s.next() != '{' {
			if s.value() {
				s.err = &Error{CodeNotAnObject, `the body must be a JSON object with the calls in its array "batch"`}
			}
			return false
		}
		_, ok := s.members(true)
		return ok
	})
	if err != nil {
		return err
	}
	s.flush()
	for _, m := range s.open {
		f := fieldOf(s.text(m.key))
		p.common[f] = s.text(m.value)
		p.replaced = p.replaced || m.replaced && (f == fieldContext || f == fieldIntegrations)
		if string(s.text(m.key)) == `"batch"` {
			isArray = s.text(m.value)[0] == '['
		}
	}
	r.WriteKey = decoded(p.common[fieldWriteKey])
	for _, f := range [...]field{fieldContext, fieldIntegrations} {
		object, err := p.common.object(f)
		if err != nil {
			return err
		}
		if len(object) <= len("{}") {
			object = nil // It adds no members.
		}
		p.common[f] = object
	}
	p.commonSent = readTime(p.common[fieldSentAt])
	if !isArray || len(s.calls) == 0 {
		return &Error{CodeEmptyBatch, `the body has no calls; send them as objects in its array "batch"`}
	}
	return nil
}

func (p *parser) single() error {
	if err := p.accept(0, p.s.calls[0]); err != nil {
		return err
	}
	return nil
}

func (p *parser) batch() error {
	s := p.s
	p.result.Calls = make([]Call, 0, len(s.calls))
	p.result.Indexes = make([]int, 0, len(s.calls))
	for i, c := range s.calls {
		if err := p.accept(i, c); err != nil {
			p.result.Rejected = append(p.result.Rejected, Rejection{i, err})
		}
		if len(s.bodies) > p.most {
			return batchTooLarge(len(s.calls), p.most)
		}
	}
	if s.excess > 0 {
		err := &Error{CodeTooManyCalls, fmt.Sprintf("a batch has at most %d calls, those after them are rejected; split the batch", MaxBatchCalls)}
		for i := range s.excess {
			p.result.Rejected = append(p.result.Rejected, Rejection{len(s.calls) + i, err})
		}
	}
	return nil
}

// batch scans the value of "batch". The last one of several is used.
func (s *scanner) batch() bool {
	s.calls, s.kept, s.excess = s.calls[:0], s.kept[:0], 0
	if s.next() != '[' {
		return s.value()
	}
	s.pos++
	s.space()
	if s.next() == ']' {
		s.pos++
		return true
	}
	for {
		if !s.call() {
			return false
		}
		if more, ok := s.separator(']', "',' or ']'"); !ok || !more {
			return ok
		}
	}
}

// call scans a call. It fails only if the whole body is unreadable.
func (s *scanner) call() bool {
	s.flush()
	start, begin, base, depth := s.pos, len(s.out), len(s.open), s.depth
	s.depth = 0
	replaced := s.replaced
	long := s.long
	s.long = false
	c := rawCall{from: len(s.kept)}
	var ok bool
	if s.next() == '{' {
		_, ok = s.members(false)
	} else if ok = s.value(); ok {
		c.err = &Error{CodeNotAnObject, "a call must be a JSON object"}
	}
	if !ok {
		if s.err.Code != CodeTooDeep {
			return false
		}
		c.err, s.err = s.err, nil
		s.pos = start
		if !s.skip() {
			return false
		}
	}
	s.depth = depth
	c.long, s.long = s.long, long // the rest of s.long belongs to the batch
	c.replaced = s.replaced > replaced
	if c.size = s.pos - start; c.size > MaxCallBytes && c.err == nil {
		c.err = callTooLarge
	}
	if excess := len(s.calls) == MaxBatchCalls; excess || c.err != nil {
		s.out, s.copied = s.out[:begin], s.pos
		s.open = s.open[:base]
		if excess {
			s.excess++
			return true
		}
	}
	s.kept = append(s.kept, s.open[base:]...)
	s.open = s.open[:base]
	c.to = len(s.kept)
	s.calls = append(s.calls, c)
	return true
}

// skip finds the end of a rejected value, at any depth.
func (s *scanner) skip() bool {
	depth := 0
	for ; s.pos < len(s.in); s.pos++ {
		switch s.in[s.pos] {
		case '"':
			for s.pos++; s.pos < len(s.in) && s.in[s.pos] != '"'; s.pos++ {
				if s.in[s.pos] == '\\' {
					s.pos++
				}
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				s.pos++
				return true
			}
		}
	}
	s.pos = len(s.in)
	return s.fail("the end of an array or object")
}

// callTooLarge reports whether a call is too large together with the batch's context and
// integrations.
func (p *parser) callTooLarge(c rawCall) bool {
	return c.size+len(p.common[fieldContext])+len(p.common[fieldIntegrations]) > MaxCallBytes
}

// values returns the values of a call's fields, and the set of fields that it has.
func (s *scanner) values(c rawCall) (v values, sent uint32) {
	members := s.kept[c.from:c.to]
	for i := range members {
		m := &members[i]
		if m.field = fieldOf(s.out[m.key.from:m.key.to]); m.field != fieldOther {
			v[m.field] = s.out[m.value.from:m.value.to]
			sent |= 1 << m.field
		}
	}
	return v, sent
}

// accept validates a call and writes its message.
func (p *parser) accept(index int, c rawCall) *Error {
	if c.err != nil {
		return c.err
	}
	if p.callTooLarge(c) {
		return callTooLarge
	}
	s := p.s
	members := s.kept[c.from:c.to]
	v, sent := s.values(c)
	t, err := v.callType(p.Type)
	if err != nil {
		return err
	}
	if err := v.validate(t); err != nil {
		return err
	}
	for i := range members {
		if m := &members[i]; m.replaced && m.field.isID() {
			return &Error{CodeInvalidField, fieldNames[m.field] + " is not valid UTF-8; encode the request in UTF-8"}
		}
	}

	// New values are appended to the scanned output, and are overwritten by the next call.
	end := len(s.out)
	var place placed
	v[fieldType] = s.made(appendString(s.out, string(t)))
	v[fieldVersion] = one
	v[fieldWriteKey] = nil
	if missing(v[fieldMessageID]) {
		v[fieldMessageID] = s.made(appendString(s.out, p.NewID()))
	}
	place.messageID = s.decode(v[fieldMessageID])
	if n := place.messageID; n.to-n.from > MaxMessageIDRunes && runes(s.texts[n.from:n.to]) > MaxMessageIDRunes {
		s.out, s.texts = s.out[:end], s.texts[:n.from]
		return &Error{CodeMessageIDTooLong, fmt.Sprintf(`"messageId" is longer than the %d characters allowed; use a UUID`, MaxMessageIDRunes)}
	}
	place.event, place.userID, place.anonymousID = s.decode(v[fieldEvent]), s.decode(v[fieldUserID]), s.decode(v[fieldAnonymousID])
	if t == Alias {
		v[fieldSpelledPreviousID], v[fieldSpelledUserID] = v[fieldPreviousID], v[fieldUserID]
	}

	v[fieldIntegrations] = s.merge(p.common[fieldIntegrations], v[fieldIntegrations])
	v[fieldContext] = s.merge(p.common[fieldContext], v[fieldContext])
	if missing(v[fieldContext]) {
		v[fieldContext] = emptyObject
	}
	if p.ClientIP.IsValid() {
		v[fieldContext] = s.addIP(v[fieldContext], p.ClientIP, p.FromBrowser)
	}

	// A body with both times is a message of Posthorn, whose timestamp is corrected already.
	delivered := !missing(v[fieldReceivedAt]) && !missing(v[fieldOriginalTimestamp])
	v[fieldReceivedAt] = s.receivedAt
	timestamp, defects := p.timestamp(&v, delivered)
	if c.replaced || p.replaced {
		defects |= DefectEncoding
	}
	v[fieldTimestamp] = s.made(appendQuotedTime(s.out, timestamp))

	place.long = c.long || s.long
	place.body.from = len(s.bodies)
	b := append(s.bodies, '{')
	write := func(key []byte, f field, value []byte) {
		b = append(append(append(b, key...), ':'), value...)
		if f == fieldIntegrations {
			place.integrations = span{len(b) - len(value), len(b)}
		}
		b = append(b, ',')
	}
	for i := range members {
		m := &members[i]
		value := v[m.field]
		if m.field == fieldOther {
			value = s.out[m.value.from:m.value.to]
		}
		if value != nil {
			write(s.out[m.key.from:m.key.to], m.field, value)
		}
	}
	for f := fieldType; f < fieldCount; f++ {
		if v[f] != nil && sent&(1<<f) == 0 {
			b = append(b, fieldNames[f]...)
			write(nil, f, v[f])
		}
	}
	b[len(b)-1] = '}'
	s.bodies, s.out = b, s.out[:end]
	place.body.to = len(b)
	s.places = append(s.places, place)
	p.result.Calls = append(p.result.Calls, Call{Type: t, Timestamp: time.UnixMilli(timestamp).UTC(), Defects: defects})
	p.result.Indexes = append(p.result.Indexes, index)
	return nil
}

// timestamp returns the time of a call by the server's clock. It puts the call's own time into originalTimestamp,
// and the batch's sentAt into a call without one.
func (p *parser) timestamp(v *values, delivered bool) (ms int64, defects Defects) {
	sentAt := readTime(v[fieldSentAt])
	if !sentAt.ok {
		sentAt.failed = sentAt.failed || p.commonSent.failed
		if p.commonSent.ok {
			v[fieldSentAt], sentAt.ms, sentAt.ok = p.common[fieldSentAt], p.commonSent.ms, true
		}
	}
	own, defects := v.eventTime()
	switch {
	case !own.ok:
		return p.received, defects
	case p.Import || delivered:
		return own.ms, defects
	}
	ms, known := corrected(p.received, sentAt, own)
	if !known {
		defects |= DefectClock
	}
	return ms, defects | sentAt.unread(DefectSentAt)
}

// finish builds the bytes of the calls: one allocation for all messages, one for all strings.
// Messages that are too large for the pool are not copied.
func (p *parser) finish() {
	bodies, texts := p.s.bodies, string(p.s.texts)
	if cap(bodies) > maxPooled {
		p.s.bodies = nil
	} else {
		bodies = bytes.Clone(bodies)
	}
	for i, place := range p.s.places {
		c := &p.result.Calls[i]
		c.Body = bodies[place.body.from:place.body.to:place.body.to]
		c.LongNumbers = place.long && !IsFixedPoint(c.Body)
		if n := place.integrations; n.to-n.from > len("{}") && bodies[n.from] == '{' {
			c.Integrations.object = bodies[n.from:n.to:n.to]
		}
		c.MessageID = texts[place.messageID.from:place.messageID.to]
		c.Event = strings.ToValidUTF8(texts[place.event.from:place.event.to], "\ufffd")
		c.UserID = texts[place.userID.from:place.userID.to]
		c.AnonymousID = texts[place.anonymousID.from:place.anonymousID.to]
	}
}

// callType returns the type in the path, or the type in the call of a batch.
func (v *values) callType(path Type) (Type, *Error) {
	if path != "" {
		return path, nil
	}
	text := v[fieldType]
	if missing(text) {
		return "", &Error{CodeNoType, `"type" is missing; each call in a batch needs one of identify, track, page, screen, group and alias`}
	}
	for _, t := range [...]Type{Track, Page, Identify, Screen, Group, Alias} {
		if text[0] == '"' && string(text[1:len(text)-1]) == string(t) {
			return t, nil
		}
	}
	return "", &Error{CodeUnknownType, `"type" must be one of identify, track, page, screen, group and alias, in lower case`}
}

// validate checks a call by the rules of its type, and converts strings and objects that are sent
// in another form.
func (v *values) validate(t Type) *Error {
	for _, f := range [...]field{fieldMessageID, fieldUserID, fieldAnonymousID, fieldPreviousID, fieldGroupID, fieldEvent} {
		text := v[f]
		if missing(text) {
			continue
		}
		switch text[0] {
		case '"':
		case '{', '[', 't', 'f':
			return &Error{CodeInvalidField, fieldNames[f] + " must be a string (a number is converted to one)"}
		default:
			quoted := make([]byte, 0, len(text)+2)
			v[f] = append(append(append(quoted, '"'), text...), '"')
		}
	}
	for _, f := range [...]field{fieldContext, fieldIntegrations, fieldTraits, fieldProperties} {
		object, err := v.object(f)
		if err != nil {
			return err
		}
		if object != nil {
			v[f] = object
		}
	}
	require := func(f field, code, what string) *Error {
		if missing(v[f]) {
			return &Error{code, string(t) + ": " + fieldNames[f] + " is missing; " + what}
		}
		return nil
	}
	switch t {
	case Alias:
		if err := require(fieldPreviousID, CodeNoPreviousID, "send the user's former id"); err != nil {
			return err
		}
		return require(fieldUserID, CodeNoUserID, "send the user's new id")
	case Track:
		if err := require(fieldEvent, CodeNoEvent, "send the name of the event"); err != nil {
			return err
		}
	case Group:
		if err := require(fieldGroupID, CodeNoGroupID, "send the id of the group"); err != nil {
			return err
		}
	}
	if missing(v[fieldUserID]) && missing(v[fieldAnonymousID]) {
		return &Error{CodeNoUserAnonID, string(t) + `: "userId" and "anonymousId" are missing; send at least one of them`}
	}
	return nil
}

// object returns a field that must be an object, nil if there is none.
func (v *values) object(f field) ([]byte, *Error) {
	text := v[f]
	switch {
	case len(text) == 0 || text[0] == 'n':
		return nil, nil
	case text[0] == '{':
		return text, nil
	case string(text) == "[]":
		return emptyObject, nil
	}
	return nil, &Error{CodeInvalidField, fieldNames[f] + " must be an object"}
}

// missing reports whether a value is absent, null or empty.
func missing(value []byte) bool {
	return len(value) == 0 || value[0] == 'n' || string(value) == `""`
}

// runes returns the number of code points of WTF-8.
func runes(text []byte) (n int) {
	for _, c := range text {
		if c&0xc0 != 0x80 {
			n++
		}
	}
	return n
}

// decoded returns the characters of a canonical JSON string; "" for anything else.
func decoded(value []byte) string {
	if len(value) == 0 || value[0] != '"' {
		return ""
	}
	return string(appendDecoded(nil, value))
}

// decode appends the characters of a canonical JSON string to s.texts.
func (s *scanner) decode(value []byte) span {
	from := len(s.texts)
	if !missing(value) {
		s.texts = appendDecoded(s.texts, value)
	}
	return span{from, len(s.texts)}
}

// merge returns the members of both objects; own takes precedence. Either may be nil, own
// also null. The result may be after the scanned output.
func (s *scanner) merge(common, own []byte) []byte {
	if common == nil {
		return own
	}
	if len(own) == 0 || own[0] != '{' {
		return common
	}
	start, base, indexes := len(s.out), len(s.open), false
	for _, object := range [...][]byte{common, own} {
		at := len(s.out)
		s.out = append(s.out, object...)
		for key, value := range membersOf(object) {
			m := member{key: span{at + key.from, at + key.to}, value: span{at + value.from, at + value.to}, index: notIndex}
			if c := object[key.from+1]; '0' <= c && c <= '9' {
				m.index = arrayIndex(object[key.from+1 : key.to-1])
				indexes = indexes || m.index != notIndex
			}
			s.open = append(s.open, m)
		}
	}
	s.order(base, indexes)
	s.rewrite(start, s.open[base:])
	s.open = s.open[:base]
	return s.out[start:]
}

// Members of a context that the libraries of mobile apps send.
var directKey, deviceKey = []byte(`"direct":`), []byte(`"device":`)

// addIP returns a context with a member ip, if the call was sent by an end user's device.
func (s *scanner) addIP(context []byte, ip netip.Addr, fromBrowser bool) []byte {
	if !fromBrowser && !bytes.Contains(context, directKey) && !bytes.Contains(context, deviceKey) {
		return context // The usual context of a server is not scanned.
	}
	var direct, device []byte
	for key, value := range membersOf(context) {
		switch string(context[key.from:key.to]) {
		case `"ip"`:
			return context
		case `"direct"`:
			direct = context[value.from:value.to]
		case `"device"`:
			device = context[value.from:value.to]
		}
	}
	if !fromBrowser && string(direct) != "true" && (missing(device) || string(direct) == "false") {
		return context
	}
	b := append(s.out, context[:len(context)-1]...)
	if len(context) > len("{}") {
		b = append(b, ',')
	}
	b = ip.WithZone("").AppendTo(append(b, `"ip":"`...))
	return s.made(append(b, `"}`...))
}

// made replaces s.out by an extended slice and returns the extension.
func (s *scanner) made(extended []byte) []byte {
	from := len(s.out)
	s.out = extended
	return extended[from:]
}

var one, emptyObject = []byte("1"), []byte("{}")
