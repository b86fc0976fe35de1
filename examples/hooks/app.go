package main

import (
	"fmt"

	"gorm.io/gorm"
)

// User is somebody of a tenant. Users, chats and messages were there before.
type User struct {
	Email  string `gorm:"primaryKey"`
	Tenant string
}

// Chat is a conversation with an agent.
type Chat struct {
	ID       string `gorm:"primaryKey"`
	Tenant   string
	Email    string
	Messages []Message
}

// Message is one side's turn of a chat.
type Message struct {
	ID     uint `gorm:"primaryKey"`
	ChatID string
	Text   string
}

// Report is written by an agent in the background, several at a time.
type Report struct {
	ID     string `gorm:"primaryKey"`
	Tenant string
	Title  string
}

// signUp registers a user and opens a first chat with a greeting, all or nothing. That is
// how the application has always done it.
func signUp(db *gorm.DB, user User, chat Chat) error {
	return db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&user).Error; err != nil {
			return fmt.Errorf("create the user: %w", err)
		}

		chat.Tenant, chat.Email = user.Tenant, user.Email
		chat.Messages = []Message{{Text: "Hello " + user.Email}}

		if err := tx.Create(&chat).Error; err != nil {
			return fmt.Errorf("open the chat: %w", err)
		}

		return nil
	})
}
