package driver

import "strings"

// ServerError is an error that the server raised while the script ran, before or at its first write:
// dsync's scripts begin with the write that may be refused, so nothing is half done.
type ServerError struct {
	Code string // the error's first word, such as OOM or READONLY; "ERR" if it has none
	Text string // the whole text as the server sent it
	Err  error  // what the client library returned, nil if the text came in a script's reply
}

// Error returns the server's text.
func (e *ServerError) Error() string { return "driver: server refused: " + e.Text }

// Unwrap returns the client library's error.
func (e *ServerError) Unwrap() error { return e.Err }

// Permanent reports whether the same script would be refused again until somebody changes the configuration
// or the data: then waiting for better times is no use.
func (e *ServerError) Permanent() bool { return permanent(e.Code, e.Text) }

// Classify turns the text of an error reply of the server to EVALSHA or EVAL into an error of this package.
// err is what the client library returned; it stays reachable with errors.As. Adapters call it for
// every error that is a reply of the server, so that one fact is one class whatever the client library.
//
// NOSCRIPT is not for this function: an adapter answers it with EVAL.
func Classify(text string, err error) error {
	code := Code(text)
	switch {
	case permanent(code, text):
		return &Error{Class: ErrPermanent, Cause: err}
	case notStarted(code, text):
		return &Error{Class: ErrNotExecuted, Cause: err}
	default:
		return &ServerError{Code: code, Text: text, Err: err}
	}
}

// Code returns the code of an error text: its first word in capitals. Texts of errors that were
// raised inside a script carry the script's position before the code (Redis 6.2, miniredis), and ERR in front of a
// better code says nothing, so both are skipped. Without any code it is "ERR".
func Code(text string) string {
	for word := range strings.FieldsSeq(text) {
		word = strings.TrimPrefix(word, "-")
		if word == "ERR" || !isCode(word) {
			continue
		}
		return word
	}
	return "ERR"
}

func isCode(word string) bool {
	if len(word) < 2 {
		return false
	}
	for i := range len(word) {
		if c := word[i]; c < 'A' || c > 'Z' {
			return false
		}
	}
	return true
}

// permanent: refused until the configuration or the data is changed by somebody.
func permanent(code, text string) bool {
	switch code {
	case "NOAUTH", "WRONGPASS", "NOPERM", "WRONGTYPE", "CROSSSLOT":
		return true
	}
	// 7.0's wording of NOPERM inside a script, and a server (or proxy) too old for what the scripts use.
	return strings.Contains(text, "The user executing the script can't") ||
		strings.Contains(text, "ACL failure in script") ||
		strings.Contains(strings.ToLower(text), "unknown command") ||
		strings.Contains(text, "Unknown Redis command called from")
}

// notStarted: the server refused the whole command before the script began.
func notStarted(code, text string) bool {
	switch code {
	case "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "MOVED", "ASK":
		return true
	}
	return strings.Contains(text, "max number of clients reached")
}
