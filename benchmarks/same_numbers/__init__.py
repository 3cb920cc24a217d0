"""Prove that a change of the code changed no number: train with two trees and compare bit by bit."""
