package analytics

// Message has the fields that all calls have in common. The client sets empty fields in the data
// that it sends; it never writes to the caller's struct.
type Message struct {
	// Type is the kind of call. The client sets it.
	Type string `json:"type,omitempty"`
	// MessageId identifies the call: a server accepts each id once. At most 100 code points. Default: a
	// UUID (version 7).
	MessageId string `json:"messageId,omitempty"`
	// Timestamp is the time of the event, in ISO 8601. Set it to import historical data. Default:
	// the time of the call, in milliseconds.
	Timestamp string `json:"timestamp,omitempty"`
	// SentAt is when the call was sent, in ISO 8601, by the clock of Timestamp. Default: the time
	// of the request.
	SentAt string `json:"sentAt,omitempty"`
}

// Batch is the body of a request with calls.
type Batch struct {
	Context  map[string]interface{} `json:"context,omitempty"`
	Messages []interface{}          `json:"batch"`
	Message
}

// Identify sets traits of a user. It needs UserId or AnonymousId.
type Identify struct {
	// Context describes the circumstances (ip, locale, page, ...).
	Context map[string]interface{} `json:"context,omitempty"`
	// Integrations selects the destinations of the call: it maps case-sensitive names to true or
	// false. "All": false excludes all others.
	Integrations map[string]interface{} `json:"integrations,omitempty"`
	// Traits are the user's properties.
	Traits      map[string]interface{} `json:"traits,omitempty"`
	AnonymousId string                 `json:"anonymousId,omitempty"`
	UserId      string                 `json:"userId,omitempty"`
	Message
}

// Track records an action. It needs Event and UserId or AnonymousId.
type Track struct {
	// Context and Integrations: see [Identify].
	Context      map[string]interface{} `json:"context,omitempty"`
	Integrations map[string]interface{} `json:"integrations,omitempty"`
	// Properties of the action.
	Properties  map[string]interface{} `json:"properties,omitempty"`
	AnonymousId string                 `json:"anonymousId,omitempty"`
	UserId      string                 `json:"userId,omitempty"`
	// Event is the action's name.
	Event string `json:"event"`
	Message
}

// Page records the view of a page. It needs UserId or AnonymousId.
type Page struct {
	// Context and Integrations: see [Identify].
	Context      map[string]interface{} `json:"context,omitempty"`
	Integrations map[string]interface{} `json:"integrations,omitempty"`
	// Traits of the page: url, title, referrer, path and any other. They are
	// sent as "properties".
	Traits      map[string]interface{} `json:"properties,omitempty"`
	AnonymousId string                 `json:"anonymousId,omitempty"`
	UserId      string                 `json:"userId,omitempty"`
	Category    string                 `json:"category,omitempty"`
	Name        string                 `json:"name,omitempty"`
	Message
}

// Screen records the view of an app's screen. It needs UserId or AnonymousId.
type Screen struct {
	// Context and Integrations: see [Identify].
	Context      map[string]interface{} `json:"context,omitempty"`
	Integrations map[string]interface{} `json:"integrations,omitempty"`
	// Properties of the screen.
	Properties  map[string]interface{} `json:"properties,omitempty"`
	AnonymousId string                 `json:"anonymousId,omitempty"`
	UserId      string                 `json:"userId,omitempty"`
	Category    string                 `json:"category,omitempty"`
	Name        string                 `json:"name,omitempty"`
	Message
}

// Group assigns a user to a group. It needs GroupId and UserId or AnonymousId.
type Group struct {
	// Context and Integrations: see [Identify].
	Context      map[string]interface{} `json:"context,omitempty"`
	Integrations map[string]interface{} `json:"integrations,omitempty"`
	// Traits are the group's properties.
	Traits      map[string]interface{} `json:"traits,omitempty"`
	AnonymousId string                 `json:"anonymousId,omitempty"`
	UserId      string                 `json:"userId,omitempty"`
	GroupId     string                 `json:"groupId"`
	Message
}

// Alias declares that two ids are one user. It needs PreviousId and UserId.
type Alias struct {
	PreviousId string `json:"previousId"`
	UserId     string `json:"userId"`
	Message
	// Context and Integrations: see [Identify].
	Context      map[string]interface{} `json:"context,omitempty"`
	Integrations map[string]interface{} `json:"integrations,omitempty"`
}

// Call is a message for [Client.Enqueue]: a pointer to an [Identify], [Track], [Page], [Screen],
// [Group] or [Alias].
type Call interface {
	call() (call, error)
}

// call is the common form of all kinds of calls, for one encoder.
type call struct {
	kind                                            kind
	message                                         Message
	userID, anonymousID, previousID, groupID, event string
	category, name                                  string
	context, integrations, traits, properties       map[string]interface{}
}

// kind is a kind of call, in one byte, because each queued call has one.
type kind uint8

const (
	identify kind = iota
	track
	page
	screen
	group
	alias
)

func (k kind) String() string {
	return [...]string{"identify", "track", "page", "screen", "group", "alias"}[k]
}

func (m *Identify) call() (call, error) {
	if m == nil {
		return call{}, ErrNilCall
	}
	return call{
		kind: identify, message: m.Message, userID: m.UserId, anonymousID: m.AnonymousId,
		context: m.Context, integrations: m.Integrations, traits: m.Traits,
	}, needUser(m.UserId, m.AnonymousId)
}

func (m *Track) call() (call, error) {
	if m == nil {
		return call{}, ErrNilCall
	}
	if m.Event == "" {
		return call{}, ErrNoEvent
	}
	return call{
		kind: track, message: m.Message, userID: m.UserId, anonymousID: m.AnonymousId, event: m.Event,
		context: m.Context, integrations: m.Integrations, properties: m.Properties,
	}, needUser(m.UserId, m.AnonymousId)
}

func (m *Page) call() (call, error) {
	if m == nil {
		return call{}, ErrNilCall
	}
	return call{
		kind: page, message: m.Message, userID: m.UserId, anonymousID: m.AnonymousId, category: m.Category, name: m.Name,
		context: m.Context, integrations: m.Integrations, properties: m.Traits,
	}, needUser(m.UserId, m.AnonymousId)
}

func (m *Screen) call() (call, error) {
	if m == nil {
		return call{}, ErrNilCall
	}
	return call{
		kind: screen, message: m.Message, userID: m.UserId, anonymousID: m.AnonymousId, category: m.Category, name: m.Name,
		context: m.Context, integrations: m.Integrations, properties: m.Properties,
	}, needUser(m.UserId, m.AnonymousId)
}

func (m *Group) call() (call, error) {
	if m == nil {
		return call{}, ErrNilCall
	}
	if m.GroupId == "" {
		return call{}, ErrNoGroupID
	}
	return call{
		kind: group, message: m.Message, userID: m.UserId, anonymousID: m.AnonymousId, groupID: m.GroupId,
		context: m.Context, integrations: m.Integrations, traits: m.Traits,
	}, needUser(m.UserId, m.AnonymousId)
}

func (m *Alias) call() (call, error) {
	if m == nil {
		return call{}, ErrNilCall
	}
	if m.UserId == "" {
		return call{}, ErrNoUserID
	}
	if m.PreviousId == "" {
		return call{}, ErrNoPreviousID
	}
	return call{
		kind: alias, message: m.Message, userID: m.UserId, previousID: m.PreviousId,
		context: m.Context, integrations: m.Integrations,
	}, nil
}

func needUser(userID, anonymousID string) error {
	if userID == "" && anonymousID == "" {
		return ErrNoUserOrAnonymousID
	}
	return nil
}
